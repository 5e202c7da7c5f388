"""How long tandem waits and how often it polls, in seconds: all such numbers that are not settings.

To understand or tune a delay, look here for what each number is measured against. Users change settings
instead (--hang-timeout, --master-timeout, ...).
"""

# Progress lines of a slow start (log.py)

SILENCE_SECONDS = 3.0
"""Silence after which a start logs what it is doing. A quick start has finished by then, or logged."""
SOON_SECONDS = 0.5
"""What takes no longer than this is not logged, however long the silence before it was."""

# Heartbeats: rank -> agent -> node 0 (telemetry/heartbeat.py, telemetry/recorder.py, launch/watchdog.py)

BEAT_SECONDS = 0.25
"""Between two heartbeats of a rank. Forty fit into the shortest hang, at no visible cost per step."""
BAR_SECONDS = 0.25
"""Between two updates of the progress bar (telemetry/displays.py), each under a millisecond of training."""
PROGRESS_SECONDS = 0.5
"""Between two messages of a rank with loss and throughput: as fast as a person can read them on the page."""
WATCHDOG_TICK_SECONDS = 0.2
"""Between two rounds of the watchdog. Less than between heartbeats, so that none waits for the next round."""
STORE_RETRY_SECONDS = 1.0
"""The watchdog's pause after the store did not answer: it is being restarted, or is gone."""
CLOCK_SKEW_SECONDS = 2.0
"""A clock difference between nodes that is reported: more than a message takes on a busy machine."""
SHORTEST_HANG_SECONDS = 10.0
"""Silence, and ranks in different collectives, are no hang before this: a busy disk takes seconds."""
STARTING_HANG_SECONDS = 60.0
"""The same until a rank has trained: imports and compilation may starve the thread that sends heartbeats."""
IDLE_HANG_SECONDS = 180.0
"""A rank that neither computes nor runs Python is no hang before this: an upload looks the same."""
AGAIN_SECONDS = 30.0
"""The same for a rank in the place where the last generation hung."""
RUNNING_TICK_SECONDS = 0.2
"""Between two readings of the clock of `running_clock.py`."""
LONGEST_GAP_SECONDS = 1.0
"""The time between two such readings counts as at most this: the process was stopped."""
SLOW_RANKS_SECONDS = 5.0
"""Between two comparisons of a script's ranks on node 0. A rank marked in six of them is reported."""
STACKS_SECONDS = 2.0
"""How long to wait for the stacks of hung ranks; writing them takes milliseconds."""
LOCAL_ANSWER_SECONDS = 1.1
"""For the stacks of a node's ranks (launch/inspection.py), so that `tandem stacks` takes less than 2 s."""
ANSWER_SECONDS = 1.6
"""For the stacks of all nodes: as above, and a round of the watchdog's exchange in each direction."""
PROFILE_SECONDS = 600.0
"""For the steps of `tandem profile`: an evaluation or a save may come between them."""
MEMORY_SECONDS = 20.0
"""For the answer of `tandem memory` after the seconds that were asked for: a snapshot may have megabytes."""
NATIVE_SECONDS = 20.0
"""For py-spy, which reads torch's symbols: a second on an idle machine."""
NO_ANSWER_SECONDS = 0.5
"""A rank that has not written its stacks by then runs no Python, so its handler in C is used."""

NAME_SECONDS = 10.0
"""How long, approximately, a rank is marked before it is reported (telemetry/stragglers.py).

On a host with many more runnable processes than cores, one of two equal ranks was marked in 32% of intervals
of 20 steps and in 15% of those of 50, each time for some seconds.
"""

# The agent and its worker processes (launch/generations.py, workers.py, simulated.py; signals.py)

MONITOR_SECONDS = 0.02
"""Between two polls of the agent's ranks. A rank's end wakes the agent; signals and alarms wait for this."""
MEMBERSHIP_SECONDS = 0.25
"""Between two checks whether nodes wait to be let in: one read of the store."""
STANDBY_SECONDS = 0.2
"""Between two forks of standby processes, 30 ms each, so that a training generation keeps its cores."""
LAST_MESSAGES_SECONDS = 0.5
"""For the last messages of a rank that ends, if its agent is busy."""
LAST_MESSAGES_POLL_SECONDS = 0.005
"""Between two tries to send them: the agent reads a message in much less."""
ENDING_SECONDS = 10.0
"""The other ranks' time after one has ended for good: rank 0 may be saving, and has the error to report."""
UNMET_SECONDS = 3.0
"""The time of ranks before their first step to end by themselves after another node has ended the job.

Node 0 waits longer than this for the others to read the job result.
"""
KILLED_SECONDS = 10.0
"""Until a rank killed by SIGKILL is gone. It takes longer only in an uninterruptible wait for a volume."""
END_LOOK_SECONDS = 0.005
"""Between two checks whether killed processes are gone: a restart waits for them."""
PIPE_SECONDS = 1.0
"""Until a helper process has ended after its pipe: its exit code shows whether a signal ended it."""
JUST_AFTER_SECONDS = 0.3
"""Processes that end this soon after successful ranks are not reported as left behind."""
LEFT_BEHIND_SECONDS = 1.0
"""What successful ranks leave running gets SIGTERM, and after this SIGKILL."""
DISMISSED_SECONDS = 1.0
"""Until a standby process whose pipe was closed is gone."""
LEAVING_SECONDS = 10.0
"""For a script's threads and exit handlers after it has failed: they may wait for peers that are gone."""
BLAME_SECONDS = 5.0
"""After a script's rank has lost its peers: until a rank here that is the cause, if any, has ended."""
OTHERS_SECONDS = 1.0
"""After a script's rank has failed or stopped: until another node, or a signal, explains it."""
SUPERVISE_SECONDS = 0.1
"""Between two polls of the simulated nodes by their launcher."""
DEAF_NODE_SECONDS = 3.0
"""After --shutdown-timeout, until a simulated node that has not stopped is killed."""
REPEAT_WINDOW_SECONDS = 2.0
"""Stop signals within this count as one: a scheduler signals the whole tree, and the agent forwards."""
START_STOP_SECONDS = 1.0
"""After a stop before the first step: until the ranks are killed. Once a step is finished, it is saved."""
MEET_TO_SAVE_SECONDS = 5.0
"""After a stop between two generations: the other nodes' time to rejoin. They join at once, or are gone."""
AT_ONCE_SECONDS = 3.0
"""How long a rank that exits at once may take to close what it has open; a volume may block that."""

# The last save of a run (checkpoint/writer.py)

SAVE_AGAIN_SECONDS = 2.0
"""Before each further attempt to save the last step, at most three: a full volume may be freed meanwhile."""

SHARDS_POLL_SECONDS = 0.02
"""Between two looks whether the other ranks have written their shards: one small request to the store."""
SHARDS_LEFT_SECONDS = 8.0
"""The time for the other ranks' shards once a run has failed; the agent waits longer for ranks to end."""

# Copies of a neighbor's shards (distributed/neighbor_link.py)

COPY_CONNECT_SECONDS = 10.0
"""For the connection to the next node's rank, which listens already, and for its first words."""
COPY_RETRY_SECONDS = 1.0
"""Between two attempts to send a copy after the connection has failed. Mostly, the other rank has ended."""

COPY_STUCK_SECONDS = 600.0
"""After a rank's own copy, until it no longer keeps its part of it: another rank cannot send its own."""

# Crash loops: starts that save nothing new (run/crash_loop.py)

FIRST_BACKOFF_SECONDS = 5.0
"""The wait before the third such start in a row; it doubles with each further one."""
LONGEST_BACKOFF_SECONDS = 120.0
"""Less than --master-timeout, for which the other nodes wait for node 0."""
STEADY_SECONDS = 600.0
"""A start that lives this long is not part of a crash loop, whatever it has saved."""

# The rendezvous (launch/rendezvous.py, launch/generations.py)

STORE_READ_SECONDS = 60
"""For a read of the agents' store. TCP alone would block a read from an unreachable node for 15 minutes."""
RENDEZVOUS_POLL_SECONDS = 0.05
"""Between two polls of the rendezvous, instead of torch's 1 s: one small read per node.

Longer among many nodes (`rendezvous_state.poll_intervals`).
"""
SHORTEST_LOOK_SECONDS = 0.001
"""The first pause while a joined node is about to write its ranks; each further one is twice as long."""
KEEP_ALIVE_SECONDS = 1
"""Between two heartbeats of a node in the rendezvous; after KEEP_ALIVE_ATTEMPTS missed ones it is out.

Longer among many nodes.
"""
KEEP_ALIVE_ATTEMPTS = 5
TORCH_POLL_SECONDS = 1.0
TORCH_KEEP_ALIVE_SECONDS = 5
"""torch's own values of both, and the upper limits here."""
BACKOFF_SECONDS_A_NODE = 0.02
"""Per node: the longest backoff of a node whose write to the shared state came too late."""
LAST_CALL_SECONDS = 1
"""How long an elastic rendezvous waits for more than MIN nodes; the first one waits FIRST_CALL_SECONDS."""
FIRST_CALL_SECONDS = 10.0
MASTER_ANSWER_SECONDS = 2.0
"""For one attempt to connect to the master; its name is resolved at each."""
HANDSHAKE_SECONDS = 20.0
"""For one message of the proof that a node knows the secret; the peer may be frozen for a while."""
QUIET_SECONDS = 60
"""Silence after which TCP checks whether the other end of a proxied connection is there."""
REFUSED_RETRY_SECONDS = 1.0
"""Between two attempts of a refused node: the secret may be on its way, or too many nodes connect at once."""
MASTER_RETRY_SECONDS = 0.1
"""Between two attempts to connect to the master."""
WAITING_WORD_SECONDS = 5.0
"""Between two lines that say what is awaited."""
LEAVE_SECONDS = 10.0
"""How long node 0 keeps the store so that the others can read the job result.

The grace period of the Kubernetes manifests includes it.
"""
CLOCK_LOOK_SECONDS = 2.5
"""How long `doctor` watches the others' heartbeats in the store: two of each node."""
ANNOUNCE_SECONDS = 30.0
"""The same before anything has started: others may still import torch, and would then wait in vain."""
LEFT_POLL_SECONDS = 0.02
"""Between two checks on node 0 whether all nodes have left."""

MEETING_FILE_SECONDS = 600.0
"""Ranks of one start write the file that connects them within this time (distributed/group_store.py)."""

# Spares (launch/spares.py)

SPARE_BEAT_SECONDS = 0.1
"""Between two reports of a node that its agent lives, in a job with spares. Longer among many nodes."""
SPARE_BEATS_MISSED = 10
"""While the others wait for a node, this number of missed reports gives its place to a spare.

A node that was only slow becomes a spare, and nothing is lost; an earlier exchange would be needless.
"""
SPARE_TAKES_SECONDS = 30.0
"""How long a node that computes wrongly waits for a spare; node 0 decides when its own ranks have ended."""
SPARE_WARM_SECONDS = 2.0
"""Until a waiting node forks its standby processes: the ranks of a generation that starts need the cores."""
SPARES_LEAVE_SECONDS = 3.0
"""How long node 0 waits at the end until all spares have read the job result: they read it every 0.1 s."""

# The lease on a run directory (run/lease.py)

OWNER_RENEW_SECONDS = 5.0
"""Between two renewals of the lease on a run directory. A launch elsewhere is refused within this time."""
OWNER_EXPIRY_SECONDS = 30.0
"""Six renewals. An older lease whose process is not visible belongs to a dead launch."""
OWNER_LOOK_SECONDS = 0.2
"""Between two checks of such a lease."""

# The page and the probes (launch/view.py, report/, telemetry/health.py)

NODE_TICK_SECONDS = 1.0
"""Between two writes of a node's health.json, with updates of its time counters."""
PAGE_SECONDS = 5.0
"""A page that has polled within this is open; it polls every 2 s.

The end of the run waits as long for its last poll.
"""
HOLD_SECONDS = 25.0
"""How long a page's request stays open for the end of the run before it repeats.

Proxies cut silent connections.
"""
STALE_SECONDS = 15.0
"""`tandem health` calls a health.json older than this a dead agent: 15 ticks, on a busy host."""
RUN_HEALTH_SECONDS = 5.0
"""Node 0 writes its heartbeat to the run directory this often: the volume may be busy."""
RUN_HEALTH_STALE_SECONDS = 30.0
"""`tandem health RUN_DIR` calls an older heartbeat a dead agent's."""
SLACK_SECONDS = 60.0
"""Beyond a state's limit until the run is unhealthy: the watchdog acts first, because probes kill nodes."""
GPU_SECONDS = 5.0
"""Between two NVML queries; a driver call may take tens of milliseconds."""
VOLUME_SECONDS = 15.0
"""The same without a GPU, when only the volume's free space is queried."""
LIST_SECONDS = 2.0
"""The page's list of checkpoints is at most this old: listing a network volume costs time."""
GIT_SECONDS = 10.0
"""For git to name a commit, on a network volume; only a separate thread waits for it."""
REQUEST_SECONDS = 5.0
"""A client's time to send its request and receive the answer: slow ones must not hold all 32 connections."""

SETTLED_SECONDS = 3600.0
"""A run without a summary that has written nothing for this long does not count as training."""
LEFT_OVER_SECONDS = 86_400.0
"""Leftovers of saves to an object store, which no manifest names, are removed at this age."""

# Trackers (report/tracking.py, launch/tracker.py)

TRACKER_SECONDS = 2.0
"""Between two reads of new rows by the tracker's process: as fresh as the page, one small read of a file."""
TRACKER_LONGEST_PAUSE_SECONDS = 60.0
"""The longest pause between attempts at a tracker that does not answer; they start at 2 s and double."""
TRACKER_RESTART_SECONDS = 1.0
"""Pause before a tracker's process that was killed is restarted; it doubles."""
OTEL_FILE_SECONDS = 1.0
"""Between two writes of the metrics for OpenTelemetry: a killed agent loses no more of them."""
OTEL_LAST_SECONDS = 5.0
"""Limit for the last write at the end of a launch, on a volume that may hang."""
OTEL_NOT_SERVED_SECONDS = 60.0
"""Pause before a collector that does not accept a kind of data gets it again: a 404 of a proxy may pass."""
OTEL_REQUEST_SECONDS = 10.0
"""The longest timeout of a request: metrics, traces and logs all have their turn in TRACKER_END_SECONDS."""
OTEL_LONGEST_WAIT_SECONDS = 600.0
"""The longest Retry-After that is honored: a wrong header must not prevent all sending."""
TRACKER_END_SECONDS = 30.0
"""For the last rows at the end of a launch: one request of TRACKER_REQUEST_SECONDS, and one retry."""
TRACKER_ORPHAN_SECONDS = 35.0
"""The same if the agent was killed and cannot end the process: longer, so that an agent does it first."""
TRACKER_RANKS_SECONDS = 1.0
"""After an agent was killed: until its ranks have ended as well and written their last rows."""
TRACKER_REQUEST_SECONDS = 8
"""For a request to MLflow, unless MLFLOW_HTTP_REQUEST_TIMEOUT is set; MLflow's own default is 120."""

# Messages to a webhook, and to Kubeflow Trainer (report/sender.py)

OUTGOING_REQUEST_SECONDS = 10.0
"""For the answer to one request; no rank and no agent waits for it."""
OUTGOING_RETRY_SECONDS = 2.0
"""Before the second attempt after a failure that may pass; the pause doubles."""
OUTGOING_END_SECONDS = 15.0
"""For the last messages at the end of a launch: one pause of TRAINER_SECONDS, and one request."""
STOPPED_END_SECONDS = 7.0
"""The same after a stop signal, within the platform's grace period."""
TRAINER_SECONDS = 5.0
"""Between two requests to Kubeflow Trainer's status endpoint, which asks for no more (KEP-2779)."""
SAME_CAUSE_SECONDS = 600.0
"""A webhook gets at most one message about the same event and cause in this time."""

# Replicas of Compose (platforms/replica.py)

RESOLVER_SECONDS = 2.0
"""For an answer of Docker's resolver, which takes milliseconds; then it is queried again."""
STAY_DOWN_SECONDS = 60.0
"""A container restarted within this, after an end that no retry can fix, exits at once."""

# verify-resume (verify/resume.py)

STEP_POLL_SECONDS = 0.001
"""Between two checks for the step at which to kill: a step of the smallest task takes 3 ms."""
END_POLL_SECONDS = 0.05
"""Between two checks whether a run has ended."""
AUDIT_POLL_SECONDS = 0.005
"""Between two looks at the files and steps of an audited program, to kill it at a chosen step."""
RANK_KILLED_SECONDS = 60.0
"""After one rank of an audited program was killed: until its launcher has ended the others."""
SHORTEST_RESTART_SECONDS = 60.0
"""A restart of an audited program may take this long, even if an uninterrupted run takes a second."""
CHECK_SAYS_SECONDS = 10.0
"""`check` reports that a part is still running after this long without a line."""
CHECK_SECONDS = 600.0
"""A rank's time in `check` to build data, model and two batches: the first time may download."""

TOOL_ANSWER_SECONDS = 20.0
"""For `tandem doctor`: another program's --version or --help."""

# The node check (verify/join.py, verify/join_measure.py): together under 3 s with eight nodes on two cores

JOIN_POLL_SECONDS = 0.01
"""Between two looks for the other nodes' answers: one small read."""
JOIN_SPEED_SECONDS = 0.2
"""For products on a device: two periods of the kernel's CPU limit, which are 0.1 s by default."""
JOIN_LINK_SECONDS = 0.1
"""For bursts in one direction of a link: several of 20 ms."""
JOIN_PEER_SECONDS = 5.0
"""For a message of the other end of a link: it connects at once, or cannot."""
JOIN_ANSWER_SECONDS = 20.0
"""For a node's answer to one test. Longer than JOIN_PEER_SECONDS, so that a dead link is not a dead node."""

# Blocks of data from object stores (data/ranges.py, data/block_cache.py, data/block_fetcher.py)

BLOCK_DEADLINE_SECONDS = 60.0
"""Attempts to read a block last this long, unless `tar_blocks` says otherwise: less than an idle hang."""
BLOCK_STALL_SECONDS = 10.0
"""A server that sends nothing for so long is asked again on a new connection."""
BLOCK_BACKOFF_SECONDS = 0.1
"""The pause after the first failed request for a block; it doubles, up to LONGEST_BLOCK_BACKOFF_SECONDS."""
LONGEST_BLOCK_BACKOFF_SECONDS = 5.0
BLOCK_ROOM_SECONDS = 0.1
"""Between two checks whether a full cache has room for a block that is read ahead."""
BLOCK_POLL_SECONDS = 0.02
"""The longest pause between two looks of a reader for its block, at most a tenth of a request."""
BLOCK_AGAIN_SECONDS = 1.0
"""A reader asks for its block again after this: the cache may have evicted it before the reader looked."""
BLOCK_PARENT_SECONDS = 1.0
"""Between two checks of the fetching process whether its rank is there."""
