# A real Slurm of two nodes on this Debian host, in namespaces (docs/slurm.md); as root, with slurm-wlm.
.PHONY: slurm-try slurm-shell

##@ Slurm
slurm-try: setup ## run train.sbatch on a two-node Slurm of this host, then remove it (root)
	@$(call words_of,ARGS); $(BIN)/python slurm/two_nodes.py try --task "$$GIVEN_TASK" \
		$${GIVEN_EPOCHS:+--epochs "$$GIVEN_EPOCHS"} "$${args[@]}"

slurm-shell: setup ## open a shell in the same cluster: sbatch, srun, scancel
	@$(BIN)/python slurm/two_nodes.py shell
