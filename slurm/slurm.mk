# A real Slurm of two nodes on this Debian host, in namespaces (docs/slurm.md); as root, with slurm-wlm.
.PHONY: slurm-try slurm-shell

slurm-try: setup ## train.sbatch on a two-node Slurm of this host; nothing of it stays (root)
	@$(BIN)/python slurm/two_nodes.py try --task '$(TASK)' $(if $(EPOCHS),--epochs $(EPOCHS)) $(ARGS)

slurm-shell: setup ## the same cluster with a shell in it: sbatch, srun, scancel; it ends with the shell
	@$(BIN)/python slurm/two_nodes.py shell
