# Nodes as containers on this host (docs/cluster-on-a-laptop.md). NODE counts from 0, as in all logs. Docker counts from
# 1, so node 0, which has rank 0, is the container PROJECT-node-1.
PROJECT ?= tandem
SPARES ?=
GPUS ?=
RATE ?=
LATENCY ?=
LOSS ?=
NODE ?=
FAULT ?=
VOLUMES ?=
TO ?=
METRICS_PORT ?=
MONITORING ?=
CPUS ?=
MEMORY ?=
SHM_SIZE ?=
TMP_SIZE ?=
SCRIPT ?=
SCRIPT_ARGS ?=
# Uses only the standard library, so it needs no .venv.
CLUSTER := PYTHONPATH=src $(PYTHON) -m tandem.cluster
# A run's name in the checkpoint volume. In other targets RUN is a directory on this host, so its default is ignored.
COMPOSE_RUN := $(if $(filter command environment,$(firstword $(origin RUN))),$(notdir $(value RUN)))
# The Makefile's default would override a task in .env, and a script has no task.
COMPOSE_TASK := $(if $(filter file,$(origin TASK)),,$(value TASK))
GIVEN += PROJECT SPARES GPUS RATE LATENCY LOSS NODE FAULT VOLUMES TO METRICS_PORT MONITORING SCRIPT SCRIPT_ARGS CPUS MEMORY SHM_SIZE TMP_SIZE COMPOSE_RUN COMPOSE_TASK
# compose/ reads these from the environment. Unset ones are not exported, because .env may set them.
EXPORTED += CPUS MEMORY SHM_SIZE TMP_SIZE PROMETHEUS_PORT GRAFANA_PORT RULES

.PHONY: compose-up compose-down compose-ps compose-logs compose-shell compose-scale compose-get chaos

##@ Docker Compose
compose-up: ## train on NODES containers; exits with the job's code (SPARES=1 SCRIPT=train.py RATE=100mbit MONITORING=1)
	@$(CLUSTER) up --project "$$GIVEN_PROJECT" --nodes "$$GIVEN_NODES" --spares "$$GIVEN_SPARES" \
		--task "$$GIVEN_COMPOSE_TASK" --epochs "$$GIVEN_EPOCHS" \
		--run "$$GIVEN_COMPOSE_RUN" --script "$$GIVEN_SCRIPT" --script-args="$$GIVEN_SCRIPT_ARGS" --args="$$GIVEN_ARGS" \
		--gpus "$$GIVEN_GPUS" --rate "$$GIVEN_RATE" --latency "$$GIVEN_LATENCY" --loss "$$GIVEN_LOSS" \
		--metrics-port "$$GIVEN_METRICS_PORT" --monitoring "$$GIVEN_MONITORING" \
		$(if $(filter undefined file,$(origin IMAGE)),,--image "$$GIVEN_IMAGE")

compose-down: ## remove the containers and their network (VOLUMES=1: and the volumes)
	@$(CLUSTER) down --project "$$GIVEN_PROJECT" --volumes "$$GIVEN_VOLUMES"

compose-ps: ## list the nodes and their state
	@$(CLUSTER) ps --project "$$GIVEN_PROJECT"

compose-logs: ## follow the logs of the nodes
	@$(CLUSTER) logs --project "$$GIVEN_PROJECT"

compose-shell: ## open a shell in a node (NODE=0)
	@$(CLUSTER) shell --project "$$GIVEN_PROJECT" --node "$${GIVEN_NODE:-0}"

compose-scale: ## continue with NODES nodes
	@$(CLUSTER) scale --project "$$GIVEN_PROJECT" --nodes "$$GIVEN_NODES"

compose-get: ## copy a run out of the volume (RUN=digits TO=directory)
	@$(CLUSTER) get --project "$$GIVEN_PROJECT" --run="$$GIVEN_COMPOSE_RUN" --to="$$GIVEN_TO" \
		$(if $(filter undefined file,$(origin IMAGE)),,--image="$$GIVEN_IMAGE")

chaos: ## inject a fault into the running cluster: FAULT=kill-rank, ..., all (NODE=1)
	@$(CLUSTER) chaos "$$GIVEN_FAULT" --project "$$GIVEN_PROJECT" --node "$$GIVEN_NODE"
