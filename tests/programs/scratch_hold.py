from tandem.launch.scratch import scratch

with scratch() as folder:
    print(folder, flush=True)
    input()
