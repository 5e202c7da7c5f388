# Nodes as containers on this host (docs/cluster-on-a-laptop.md). NODE counts from 1; rank 0 is on node 1.
PROJECT ?= tandem
GPUS ?=
RATE ?=
LATENCY ?=
LOSS ?=
NODE ?=
FAULT ?=
VOLUMES ?=
METRICS_PORT ?=
MONITORING ?=
SCRIPT ?=
SCRIPT_ARGS ?=
CLUSTER := $(PYTHON) compose/cluster.py
# A run's name in the checkpoint volume; RUN is a directory of this host elsewhere, so only a given one counts.
COMPOSE_RUN := $(if $(filter command environment,$(firstword $(origin RUN))),$(notdir $(RUN)))

# The Makefile's own default would hide a task of .env, and a script is no task.
COMPOSE_TASK := $(if $(filter file,$(origin TASK)),,$(TASK))
quoted = '$(subst ','\'',$(1))'

.PHONY: compose-up compose-down compose-ps compose-logs compose-shell compose-scale chaos

compose-up: ## train on NODES containers; its code is the job's (SCRIPT=train.py, RATE=100mbit, MONITORING=1)
	@$(CLUSTER) up --project $(PROJECT) --nodes '$(NODES)' --task '$(COMPOSE_TASK)' --epochs '$(EPOCHS)' --run '$(COMPOSE_RUN)' \
		--script $(call quoted,$(SCRIPT)) --script-args=$(call quoted,$(SCRIPT_ARGS)) --args=$(call quoted,$(ARGS)) \
		--gpus '$(GPUS)' --rate '$(RATE)' --latency '$(LATENCY)' --loss '$(LOSS)' \
		--metrics-port '$(METRICS_PORT)' --monitoring '$(MONITORING)' $(if $(filter undefined file,$(origin IMAGE)),,--image '$(IMAGE)')

compose-down: ## remove the containers and their network (VOLUMES=1: and the volumes)
	@$(CLUSTER) down --project $(PROJECT) --volumes '$(VOLUMES)'

compose-ps: ## the nodes and how they stand
	@$(CLUSTER) ps --project $(PROJECT)

compose-logs: ## follow the nodes' logs
	@$(CLUSTER) logs --project $(PROJECT)

compose-shell: ## a shell in a node (NODE=1)
	@$(CLUSTER) shell --project $(PROJECT) --node '$(or $(NODE),1)'

compose-scale: ## go on with NODES nodes
	@$(CLUSTER) scale --project $(PROJECT) --nodes '$(NODES)'

chaos: ## break the running cluster: FAULT=kill-rank, ..., all (NODE=2)
	@$(PYTHON) compose/chaos.py '$(FAULT)' --project $(PROJECT) --node '$(NODE)'
