# The container image. TORCH=cuda brings CUDA's libraries with torch; TORCH=cpu is a quarter of the size.
TORCH ?= cuda
IMAGE ?= tandem:$(TORCH)
BASE_IMAGE ?= debian:bookworm-slim
# Behind a TLS proxy or a private index: make image CA_BUNDLE=ca.pem PIP_CONF=pip.conf
PIP_CONF ?= $(PIP_CONFIG_FILE)
CA_BUNDLE ?= $(PIP_CERT)
BUILD_ARGS ?=
CONTEXT ?= .
GIVEN += TORCH IMAGE BASE_IMAGE PIP_CONF CA_BUNDLE BUILD_ARGS CONTEXT

# One line where no engine answers; standard library only.
ENGINE := $(PYTHON) docker/engine.py

.PHONY: docker-host image image-size sbom

##@ Container image
docker-host: ## prepare a Debian machine for containers: engine, Compose, base image (root)
	@$(PYTHON) docker/host.py

image: ## build the container image (TORCH=cuda|cpu)
	@[[ "$$GIVEN_TORCH" =~ ^(cuda|cpu)$$ ]] \
		|| { echo "make: TORCH: invalid value '$$GIVEN_TORCH'; expected cuda or cpu: make image TORCH=cuda" >&2; exit 2; }
	@$(ENGINE)
	@$(call words_of,BUILD_ARGS); DOCKER_BUILDKIT=1 docker build --file "$$GIVEN_CONTEXT/docker/Dockerfile" --tag "$$GIVEN_IMAGE" \
		--build-arg BASE_IMAGE="$$GIVEN_BASE_IMAGE" --build-arg TORCH="$$GIVEN_TORCH" \
		--build-arg REVISION=$$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown) \
		--build-arg VERSION=$$(sed -n 's/^__version__ = "\(.*\)".*/\1/p' src/tandem/__init__.py) \
		$${GIVEN_PIP_CONF:+--secret "id=pip_conf,src=$$GIVEN_PIP_CONF"} \
		$${GIVEN_CA_BUNDLE:+--secret "id=ca_bundle,src=$$GIVEN_CA_BUNDLE"} "$${args[@]}" "$$GIVEN_CONTEXT"

image-size: ## show the image's size and its largest layers
	@$(ENGINE) image "$$GIVEN_IMAGE"
	@docker image inspect --format '{{.Size}}' "$$GIVEN_IMAGE" \
		| awk '{printf "%s  %.2f GB\n", ENVIRON["GIVEN_IMAGE"], $$1 / 1e9}'
	@docker history --format '{{.Size}}\t{{.CreatedBy}}' "$$GIVEN_IMAGE" | grep -v '^0B' | cut -c1-100

sbom: ## list the image's Python and Debian packages with versions (sbom.json)
	@$(ENGINE) image "$$GIVEN_IMAGE"
	@docker run --rm -i --read-only --entrypoint python3 "$$GIVEN_IMAGE" - <docker/sbom.py >sbom.json
	@echo "sbom.json: $$(grep -c '"purl"' sbom.json) packages of $$GIVEN_IMAGE"
