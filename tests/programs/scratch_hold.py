from tandem.launch.run_dir import scratch

with scratch() as folder:
    print(folder, flush=True)
    input()
