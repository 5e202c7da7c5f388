# The container image. TORCH=cuda brings CUDA's libraries with torch; TORCH=cpu is a quarter of the size.
TORCH ?= cuda
IMAGE ?= tandem:$(TORCH)
BASE_IMAGE ?= debian:bookworm-slim
# Behind a TLS proxy or a private index: make image CA_BUNDLE=ca.pem PIP_CONF=pip.conf
PIP_CONF ?= $(PIP_CONFIG_FILE)
CA_BUNDLE ?= $(PIP_CERT)
BUILD_ARGS ?=
CONTEXT ?= .
comma := ,
secret = $(if $(2),--secret id=$(1)$(comma)src=$(2))

.PHONY: docker-host image image-size sbom

docker-host: ## prepare a Debian machine for images: engine, compose, base image (root)
	@$(PYTHON) docker/host.py

image: ## build the container image (TORCH=cuda|cpu)
	@[[ "$(TORCH)" =~ ^(cuda|cpu)$$ ]] \
		|| { echo "make: TORCH=$(TORCH) is not a build of torch; valid are cuda and cpu: make image TORCH=cuda" >&2; exit 2; }
	DOCKER_BUILDKIT=1 docker build --file $(CONTEXT)/docker/Dockerfile --tag $(IMAGE) \
		--build-arg BASE_IMAGE=$(BASE_IMAGE) --build-arg TORCH=$(TORCH) \
		--build-arg REVISION=$$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown) \
		--build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
		$(call secret,pip_conf,$(PIP_CONF)) $(call secret,ca_bundle,$(CA_BUNDLE)) $(BUILD_ARGS) $(CONTEXT)

image-size: ## the image's size, and its largest layers
	@docker image inspect --format '{{.Size}}' $(IMAGE) | awk '{printf "$(IMAGE)  %.2f GB\n", $$1 / 1e9}'
	@docker history --format '{{.Size}}\t{{.CreatedBy}}' $(IMAGE) | grep -v '^0B' | cut -c1-100

sbom: ## what the image holds: Python and Debian packages with versions (sbom.json)
	@docker run --rm -i --read-only --entrypoint python3 $(IMAGE) - <docker/sbom.py >sbom.json
	@echo "sbom.json: $$(grep -c '"purl"' sbom.json) packages of $(IMAGE)"
