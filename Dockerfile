FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source
FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /jobs
ENTRYPOINT ["llmsim"]
CMD ["--help"]
