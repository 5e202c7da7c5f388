"""How long tandem waits and how often it looks, in seconds: every such number that is no setting.

A reader who wonders why something takes as long as it does, or who tunes one of these, sees here what each
is measured against. What a user may change (--hang-timeout, --master-timeout, ...) is a setting instead.
"""

# What a start says of itself (silence.py)

SILENCE_SECONDS = 3.0
"""Nothing was said: a person begins to wonder. A quick start is over by then, or has said something."""
SOON_SECONDS = 0.5
"""What takes no longer is not said, however long it was silent before."""

# Signs of life: rank -> agent -> node 0 (telemetry/heartbeat.py, telemetry/recorder.py, launch/watchdog.py)

BEAT_SECONDS = 0.25
"""A rank says where it is. Forty times within the shortest hang, at no cost that shows in a step."""
BAR_SECONDS = 0.25
"""The progress bar is drawn anew, in the training thread: under a millisecond of each (telemetry/bars.py)."""
PROGRESS_SECONDS = 0.5
"""A rank's message with loss and throughput, after a step: what a person can still read on the page."""
WATCHDOG_TICK_SECONDS = 0.2
"""The watchdog looks, and talks to the store. Less than a beat, so that none waits for the next look."""
STORE_RETRY_SECONDS = 1.0
"""The watchdog's pause after the store did not answer: it is being restarted, or is gone."""
CLOCK_SKEW_SECONDS = 2.0
"""A node's clock is said to differ: more than what its words take through the store on a busy machine."""
SHORTEST_HANG_SECONDS = 10.0
"""Silence, and ranks in different collectives, are no hang before: a busy disk takes seconds."""
STARTING_HANG_SECONDS = 60.0
"""The same until a rank has trained: imports and compilation may starve the thread that speaks."""
IDLE_HANG_SECONDS = 180.0
"""A rank that neither computes nor runs Python is no hang before: an upload, or a download, looks so."""
AGAIN_SECONDS = 30.0
"""The same for a rank that stands where the last generation has hung."""
RUNNING_TICK_SECONDS = 0.2
"""Between two looks at the clock of the time while a process ran (running.py)."""
LONGEST_GAP_SECONDS = 1.0
"""What lies between two such looks counts for no more: the process was stopped."""
SLOW_RANKS_SECONDS = 5.0
"""Node 0 compares the ranks of a script; one that is marked in six looks is named."""
STACKS_SECONDS = 2.0
"""Hung ranks are asked for their stacks: until the last one has written, which takes milliseconds."""
NO_ANSWER_SECONDS = 0.5
"""A rank that has not written its stacks by then runs no Python: its handler in C is asked."""

NAME_SECONDS = 10.0
"""About how long a rank has to be marked until it is named (telemetry/stragglers.py).

Of two alike ranks on a host with many more runnable processes than cores one was marked in 32% of intervals
of 20 steps and in 15% of those of 50, each time for some seconds.
"""

# The agent and its worker processes (launch/generations.py, workers.py, simulated.py; signals.py)

MONITOR_SECONDS = 0.02
"""The agent looks at its ranks. A rank's end wakes it earlier; signals and alarms wait for this."""
MEMBERSHIP_SECONDS = 0.25
"""The agent looks whether nodes wait to be let in: one read of the store."""
STANDBY_SECONDS = 0.2
"""Between two forks of standby processes, 30 ms each: a training generation keeps its cores."""
ENDING_SECONDS = 10.0
"""The other ranks' time after one has ended for good: rank 0 may be saving, and has to say what is wrong."""
UNMET_SECONDS = 3.0
"""Ranks before their first step end by themselves so long after another node has ended the job; node 0 waits
longer than this for the others to hear it."""
KILLED_SECONDS = 10.0
"""Until a rank killed by SIGKILL is gone; longer only in an uninterruptible wait for a volume."""
END_LOOK_SECONDS = 0.005
"""Between two looks whether killed processes are gone: a restart waits for them."""
PIPE_SECONDS = 1.0
"""From the end of a pipe to a helper process until that has ended: whether a signal has ended it."""
JUST_AFTER_SECONDS = 0.3
"""Processes that end this soon after ranks that have ended well are not reported as left behind."""
LEFT_BEHIND_SECONDS = 1.0
"""What ranks that have ended well leave running has SIGTERM and this long, then SIGKILL."""
DISMISSED_SECONDS = 1.0
"""Until a standby process whose pipe was closed is gone."""
LEAVING_SECONDS = 10.0
"""A script's threads and exit handlers, after it has failed: they may wait for peers that are gone."""
BLAME_SECONDS = 5.0
"""A script's rank has lost its peers: until the one here that is to blame, if there is one, has ended."""
OTHERS_SECONDS = 1.0
"""A script's rank has failed, or was asked to stop: until another node, or a signal, says why."""
SUPERVISE_SECONDS = 0.1
"""The launcher of simulated nodes looks at them."""
DEAF_NODE_SECONDS = 3.0
"""Beyond --shutdown-timeout, until a simulated node that was asked to stop, and has not ended, is killed."""
REPEAT_WINDOW_SECONDS = 2.0
"""Stop signals within it count as one: a scheduler signals the whole tree, and the agent forwards."""
START_STOP_SECONDS = 1.0
"""A stop before the first step: until ranks that have not come to it are ended; a step is saved."""
MEET_TO_SAVE_SECONDS = 5.0
"""A stop between two generations: the other nodes' time to come once more. They come at once, or are gone."""
AT_ONCE_SECONDS = 3.0
"""A rank that is ended at once closes what it has opened, and leaves after this if a volume holds it up."""

# Starts that save nothing new (run/crash_loop.py)

FIRST_BACKOFF_SECONDS = 5.0
"""The third such start in a row waits; each one after it twice as long."""
LONGEST_BACKOFF_SECONDS = 120.0
"""Less than --master-timeout, in which the other nodes wait for node 0."""
STEADY_SECONDS = 600.0
"""A start that lives so long is no crash that repeats, whatever it has saved."""

# Where nodes meet (launch/rendezvous.py, launch/generations.py)

STORE_READ_SECONDS = 60
"""A read of the agents' store; TCP alone would hold a read from an unreachable node for 15 minutes."""
RENDEZVOUS_POLL_SECONDS = 0.05
"""Between two looks at who is there, instead of torch's 1 s: one small read per node. More among many nodes
(`rendezvous_state.paces`)."""
SHORTEST_LOOK_SECONDS = 0.001
"""The first pause for a node that has come and is about to say which ranks it has; each one twice as long."""
KEEP_ALIVE_SECONDS = 1
"""A node in the rendezvous says that it lives; after KEEP_ALIVE_ATTEMPTS misses it is out. As above."""
KEEP_ALIVE_ATTEMPTS = 5
TORCH_POLL_SECONDS, TORCH_KEEP_ALIVE_SECONDS = 1.0, 5
"""torch's own times of both, and the longest here."""
BACKOFF_SECONDS_A_NODE = 0.02
"""Among many nodes, times their number: the longest wait of one whose write to the shared state came late."""
LAST_CALL_SECONDS = 1
"""An elastic rendezvous waits for more nodes, once MIN are there; the first one waits FIRST_CALL_SECONDS."""
FIRST_CALL_SECONDS = 10.0
MASTER_ANSWER_SECONDS = 2.0
"""One attempt to connect to the master; names are resolved anew at each."""
HANDSHAKE_SECONDS = 20.0
"""A word of a node that proves that it knows the job's secret; the other may be frozen for a while."""
QUIET_SECONDS = 60
"""A node's way to the store is asked whether the other end is there, when it has said nothing for so long."""
REFUSED_RETRY_SECONDS = 1.0
"""A node that was not let in asks again: a secret may be on its way, and many may crowd at the gate."""
MASTER_RETRY_SECONDS = 0.1
"""Between two such attempts."""
WAITING_WORD_SECONDS = 5.0
"""Between two lines that say what is waited for."""
LEAVE_SECONDS = 10.0
"""Node 0 keeps the store for the others to hear the verdict; kubernetes' grace period counts on it."""
CLOCK_LOOK_SECONDS = 2.5
"""`doctor` listens for the others' signs of life in the store: two of each node's."""
ANNOUNCE_SECONDS = 30.0
"""The same before anything has begun: others may still import torch, and would wait for it in vain."""
LEFT_POLL_SECONDS = 0.02
"""Node 0 looks meanwhile whether all have left."""

MEETING_FILE_SECONDS = 600.0
"""Ranks of one start write the file in which they meet within so many seconds (distributed/meeting.py)."""

# Who a run directory belongs to (run/lease.py)

OWNER_RENEW_SECONDS = 5.0
"""The owner renews its note; a launch elsewhere that finds one is refused within this."""
OWNER_EXPIRY_SECONDS = 30.0
"""A note that is older than six renewals, where nobody can see its process, is of a dead launch."""
OWNER_LOOK_SECONDS = 0.2
"""Between two looks at such a note."""

# The page and the probes (launch/view.py, report/, telemetry/health.py)

NODE_TICK_SECONDS = 1.0
"""A node's agent writes health.json and brings counters of time up to date."""
PAGE_SECONDS = 5.0
"""A page that is open asks every 2 s: one that has asked within this is waited for at the end, as long."""
HOLD_SECONDS = 25.0
"""A page's connection is held so long for the end of the run, and then again: proxies cut off the silent."""
STALE_SECONDS = 15.0
"""`tandem health` calls a health.json older than this a dead agent: 15 ticks, on a busy host."""
SLACK_SECONDS = 60.0
"""Beyond the limit of a state until the run is unhealthy: the watchdog acts first, a probe kills the node."""
GPU_SECONDS = 5.0
"""NVML is asked; a driver call may take tens of milliseconds."""
VOLUME_SECONDS = 15.0
"""The same where there is no GPU and only the volume's free space is asked."""
LIST_SECONDS = 2.0
"""The page's list of checkpoints is as old as this at most: a listing of a network volume is not free."""
GIT_SECONDS = 10.0
"""What git may take to name a commit, on a network volume; nobody waits for it but a thread of its own."""
REQUEST_SECONDS = 5.0
"""A client's time to send its request and to take the answer: slow ones must not hold the 32 connections."""

SETTLED_SECONDS = 3600.0
"""A run without a summary that has written nothing for so long is not taken for one that trains."""
LEFT_OVER_SECONDS = 86_400.0
"""What a save to an object store has left, and no manifest names, is removed when it is so old."""

# A run at a tracker (report/tracking.py, launch/tracker.py)

TRACKER_SECONDS = 2.0
"""The tracker's process looks for new rows: as fresh as the page, and a small read of one file."""
TRACKER_LONGEST_PAUSE_SECONDS = 60.0
"""Between two attempts at a tracker that does not answer: they begin with 2 s and double."""
TRACKER_END_SECONDS = 30.0
"""For the last rows when the launch ends: one request of TRACKER_REQUEST_SECONDS, and the one tried again."""
TRACKER_REQUEST_SECONDS = 8
"""A request to MLflow, where MLFLOW_HTTP_REQUEST_TIMEOUT does not say another; MLflow's own is 120."""

# Replicas of Compose (platforms/replica.py)

RESOLVER_SECONDS = 2.0
"""Docker's resolver answers in milliseconds, and is asked again after this."""
STAY_DOWN_SECONDS = 60.0
"""A container started again within it, after an end that no retry mends, leaves at once."""

# The proof of resumes (verify/resume.py)

STEP_POLL_SECONDS = 0.001
"""Looks for the step to kill at: a step of the smallest task takes 3 ms."""
END_POLL_SECONDS = 0.05
"""Looks whether a run has ended."""
CHECK_SAYS_SECONDS = 10.0
"""`check` says that it is still at a part after so long without a line."""
CHECK_SECONDS = 600.0
"""What `check` gives a rank to make data, model and two batches: the first time may download."""

TOOL_ANSWER_SECONDS = 20.0
"""`tandem doctor` waits so long for another program's --version or --help."""
