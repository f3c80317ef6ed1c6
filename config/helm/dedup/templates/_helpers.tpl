{{- define "dedup.name" -}}
dedup-{{ .Release.Name }}
{{- end }}
{{- define "dedup.selector" -}}
app.kubernetes.io/name: dedup
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "dedup.labels" -}}
{{ include "dedup.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "dedup.metadata" -}}
name: {{ include "dedup.name" . }}
labels: {{- include "dedup.labels" . | nindent 2 }}
{{- end }}
