# A real Slurm of two nodes on this Debian host, in namespaces (docs/slurm.md); as root, with slurm-wlm.
.PHONY: slurm-try slurm-shell

slurm-try: setup ## train.sbatch on a two-node Slurm of this host; nothing of it stays (root)
	@$(call words_of,ARGS); $(BIN)/python slurm/two_nodes.py try --task "$$GIVEN_TASK" \
		$${GIVEN_EPOCHS:+--epochs "$$GIVEN_EPOCHS"} "$${args[@]}"

slurm-shell: setup ## the same cluster with a shell in it: sbatch, srun, scancel; it ends with the shell
	@$(BIN)/python slurm/two_nodes.py shell
