def rank(job, start):
    raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")
