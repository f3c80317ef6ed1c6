# The worker: run dependencies only, no compiler, no root. It never runs with -O: assertions guard invariants.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements.lock ./
RUN python3 -m venv /opt/dedup \
 && /opt/dedup/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements.lock
COPY pyproject.toml README.md ./
COPY dedup dedup
RUN /opt/dedup/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home dedup \
 && install -d -o dedup -g dedup /var/lib/dedup
COPY --from=build /opt/dedup /opt/dedup
COPY topologies /app/topologies
COPY config /app/config
ENV PATH=/opt/dedup/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app
USER 10001
VOLUME /var/lib/dedup
ENTRYPOINT ["dedup"]
CMD ["--help"]
