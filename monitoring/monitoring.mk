# Prometheus and Grafana beside the cluster of compose/, and what is made from other files (docs/monitoring.md).
PROMETHEUS_PORT ?= 9090
GRAFANA_PORT ?= 3000
RULES ?=
GIVEN += PROMETHEUS_PORT GRAFANA_PORT RULES
WATCHERS := PROMETHEUS_PORT="$$GIVEN_PROMETHEUS_PORT" GRAFANA_PORT="$$GIVEN_GRAFANA_PORT" docker compose \
	--project-name "$${GIVEN_PROJECT:-tandem}" --file compose/compose.yaml --file compose/monitoring.yaml

.PHONY: monitoring-up monitoring-down dashboard dashboard-json rules-check screenshots

##@ Monitoring
monitoring-up: ## start Prometheus and Grafana next to the containers (RULES=short.yaml: other rules)
	@$(ENGINE) compose
	@[[ -z "$$GIVEN_RULES" ]] || export RULES="$$(realpath --no-symlinks "$$GIVEN_RULES")"; $(WATCHERS) up --detach prometheus grafana \
		|| { echo "make: where their images cannot be had, name others: PROMETHEUS_IMAGE=NAME GRAFANA_IMAGE=NAME" >&2; exit 2; }
	@$(MAKE) --silent dashboard

monitoring-down: ## stop them; their data stays in the volumes
	@$(ENGINE) compose
	@$(WATCHERS) rm --stop --force prometheus grafana

dashboard: ## print the addresses of page, Prometheus and Grafana
	@echo "live page   http://127.0.0.1:$${GIVEN_METRICS_PORT:-19469}/"
	@echo "Prometheus  http://127.0.0.1:$$GIVEN_PROMETHEUS_PORT/alerts"
	@echo "Grafana     http://127.0.0.1:$$GIVEN_GRAFANA_PORT/d/tandem"

dashboard-json: ## generate k8s/components/monitoring/dashboard.json from dashboard.py
	$(PYTHON) monitoring/dashboard.py

rules-check: ## test the alert rules with promtool
	@command -v promtool >/dev/null \
		|| { echo "make: promtool is not installed; on Debian: sudo apt-get install prometheus" >&2; exit 2; }
	promtool check rules --lint=all --lint-fatal monitoring/rules.yaml
	cd monitoring && promtool test rules rules.test.yaml

screenshots: setup-dev ## record docs/pictures again (needs Chromium)
	TANDEM_SCREENSHOTS=1 $(BIN)/python -m pytest -q tests/monitoring/test_page.py
