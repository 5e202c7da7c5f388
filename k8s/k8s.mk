# Kubernetes. All but k8s-validate and k8s-generate need kubectl and Python's standard library alone.
#   OVERLAY=   a kind (pytorchjob, the default; trainjob, jobset, indexed-job), components of k8s/components
#              (gpu,kueue), or both: trainjob,gpu
#   NAMESPACE= the context's own by default       IMAGE= NAME[:TAG][@sha256:DIGEST] in place of the manifest's
#   NAME=      of the job, tandem by default      NODES= pods of the job, 3 by default
OVERLAY ?= pytorchjob
NAMESPACE ?=
NAME ?= tandem
PURGE ?=

GIVEN += OVERLAY NAMESPACE NAME PURGE

K8S_IMAGE = $(if $(filter undefined file,$(origin IMAGE)),,--image "$$GIVEN_IMAGE")
# The Makefile's own NODES is for `make train`.
K8S_NODES = $(if $(call is_given,NODES),--nodes "$$GIVEN_NODES")
K8S_TOOL = PYTHONPATH=src $(PYTHON) -m tandem.kubernetes
K8S_TARGET = --overlay "$$GIVEN_OVERLAY" --namespace "$$GIVEN_NAMESPACE" --name "$$GIVEN_NAME" \
	$(K8S_NODES) $(K8S_IMAGE)

.PHONY: k8s-render k8s-validate k8s-generate k8s-apply k8s-logs k8s-status k8s-forward k8s-delete \
	k8s-try k8s-release

##@ Kubernetes
k8s-render: ## print the manifest of OVERLAY (no cluster needed; NAME=tandem NODES=3)
	@$(K8S_TOOL) render $(K8S_TARGET)

k8s-validate: setup-dev ## check all manifests: schemas, rules, pod security
	@PYTHONPATH=k8s:src $(BIN)/python -m tandem_k8s validate

k8s-generate: setup-dev ## write all generated files: owner, version, chart, runtime, rules, golden files
	@PYTHONPATH=k8s:src $(BIN)/python -m tandem_k8s generate

k8s-apply: ## start the job of OVERLAY in the current cluster
	@$(K8S_TOOL) apply $(K8S_TARGET)

k8s-logs: ## follow the logs of all its pods
	@$(K8S_TOOL) logs $(K8S_TARGET)

k8s-status: ## show the job, its pods, volume and warnings
	@$(K8S_TOOL) status $(K8S_TARGET)

k8s-forward: ## open node 0's live page and metrics on http://localhost:19469/
	@$(K8S_TOOL) forward $(K8S_TARGET)

k8s-delete: ## remove the job; the volume stays (PURGE=1 removes it)
	@$(K8S_TOOL) delete $(K8S_TARGET) $${GIVEN_PURGE:+--purge}

k8s-try: ## try it in a cluster on this machine (kind or minikube)
	@PYTHONPATH=k8s:src $(PYTHON) -m tandem_k8s try $(K8S_IMAGE)

k8s-release: ## write manifests with the image by digest into dist: IMAGE=NAME[:TAG]@sha256:DIGEST
	@PYTHONPATH=k8s:src $(PYTHON) -m tandem_k8s release $(K8S_IMAGE)
