"""Trains a number without torch, and forgets its momentum when it resumes."""

import json
import os
import time

number, momentum, first = 8.0, 0.0, 0
if os.path.exists("state.json"):
    with open("state.json") as file:
        number, first = json.load(file)
for step in range(first, 60):
    momentum = 0.9 * momentum - 0.01 * number
    number += momentum
    with open("log.jsonl", "a") as log:
        log.write(json.dumps({"step": step + 1, "loss": number * number}) + "\n")
    with open("state.new", "w") as file:
        json.dump([number, step + 1], file)
    os.replace("state.new", "state.json")
    time.sleep(0.02)
