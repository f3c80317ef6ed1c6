{{- define "dedup.name" -}}
{{- /* A Service's name has no dot. A StatefulSet with a name of more than 52 characters makes no pods: a label would be too long. */}}
{{- if or (contains "." .Release.Name) (gt (len .Release.Name) 46) }}
{{- fail (printf "The name of the release, %q, becomes part of the names of pods and of a Service: choose one of at most 46 characters without dots." .Release.Name) }}
{{- end -}}
dedup-{{ .Release.Name }}
{{- end }}
{{- define "dedup.selector" -}}
app.kubernetes.io/name: dedup
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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
{{- /* The size of a volume in MiB: the API writes 1024Gi as 1Ti. */}}
{{- define "dedup.mebibytes" -}}
{{- mul (regexFind "^[0-9]+" .) (get (dict "Mi" 1 "Gi" 1024 "Ti" 1048576 "Pi" 1073741824) (regexFind "[A-Z]i$" .) | default 0) }}
{{- end }}
