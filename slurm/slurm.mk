# A real two-node Slurm cluster on this Debian host, in namespaces (docs/slurm.md). Needs root and slurm-wlm.
.PHONY: slurm-try slurm-shell

##@ Slurm
slurm-try: setup ## run train.sbatch on a two-node Slurm cluster on this host, then remove it (root)
	@$(call words_of,ARGS); $(BIN)/python slurm/two_nodes.py try --task "$$GIVEN_TASK" \
		$${GIVEN_EPOCHS:+--epochs "$$GIVEN_EPOCHS"} "$${args[@]}"

slurm-shell: setup ## open a shell in such a cluster: sbatch, srun, scancel
	@$(BIN)/python slurm/two_nodes.py shell
