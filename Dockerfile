# A server on a CPU, with the demo model unless another is named. docs/getting-started/install.md says how to run it.
FROM python:3.12-slim
ARG PIP_ARGS=""
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt $PIP_ARGS .
RUN useradd --create-home penstock && install -d -o penstock /cache
ENV PENSTOCK_CACHE=/cache HF_HOME=/cache/huggingface
VOLUME /cache
USER penstock
EXPOSE 8000
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/keys"]
CMD ["demo"]
