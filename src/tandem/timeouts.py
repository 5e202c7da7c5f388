"""How long tandem waits and how often it polls, in seconds: all such numbers that are not settings.

Each docstring gives the reason for its number. Users change settings instead (--hang-timeout,
--master-timeout, ...).
"""

# Progress lines of a slow start (log.py)

SILENCE_SECONDS = 3.0
"""Silence after which a start logs what it is doing. A quick start has finished by then, or logged."""
SOON_SECONDS = 0.5
"""An action that takes no longer than this is not logged, however long the silence before it was."""

# Heartbeats: rank -> agent -> node 0 (telemetry/heartbeat.py, telemetry/recorder.py, launch/watchdog.py)

BEAT_SECONDS = 0.25
"""Pause between two heartbeats of a rank. The shortest hang has forty, at no visible cost per step."""
BAR_SECONDS = 0.25
"""Pause between two updates of the progress bar (telemetry/displays.py); each takes under a millisecond."""
PROGRESS_SECONDS = 0.5
"""Pause between two messages of a rank with loss and throughput: as fast as people can read the page."""
WATCHDOG_TICK_SECONDS = 0.2
"""Pause between two rounds of the watchdog. Less than BEAT_SECONDS, so no heartbeat waits for another."""
STORE_RETRY_SECONDS = 1.0
"""Pause of the watchdog after the store did not answer: it is being restarted, or is gone."""
CLOCK_SKEW_SECONDS = 2.0
"""Clock difference between nodes that is reported: more than a message takes on a busy machine."""
SHORTEST_HANG_SECONDS = 10.0
"""Shortest time before silence, or ranks in different collectives, is a hang: a busy disk takes seconds."""
STARTING_HANG_SECONDS = 60.0
"""The same until a rank has trained: imports and compilation may starve the heartbeat thread."""
IDLE_HANG_SECONDS = 180.0
"""Shortest time before a rank that neither computes nor runs Python is hung: an upload looks the same."""
AGAIN_SECONDS = 30.0
"""The same for a rank in the place where the last generation hung."""
RUNNING_TICK_SECONDS = 0.2
"""Pause between two readings of the clock in `running_clock.py`."""
LONGEST_GAP_SECONDS = 1.0
"""Longest time that counts between two such readings; in a longer gap, the process was stopped."""
SLOW_RANKS_SECONDS = 5.0
"""Pause between two comparisons of a script's ranks on node 0. A rank marked in six of them is reported."""
STACKS_SECONDS = 2.0
"""Limit for the stacks of hung ranks; writing them takes milliseconds."""
LOCAL_ANSWER_SECONDS = 1.1
"""Limit for the stacks of a node's ranks (launch/inspection.py); `tandem stacks` then takes under 2 s."""
ANSWER_SECONDS = 1.6
"""Limit for the stacks of all nodes: as above, plus a round of the watchdog's exchange each way."""
PROFILE_SECONDS = 600.0
"""Limit for the steps of `tandem profile`: an evaluation or a save may come between them."""
MEMORY_SECONDS = 20.0
"""Limit for the answer of `tandem memory` after the requested seconds: a snapshot may have megabytes."""
NATIVE_SECONDS = 20.0
"""Limit for py-spy, which reads torch's symbols: a second on an idle machine."""
NO_ANSWER_SECONDS = 0.5
"""Limit for a rank's Python handler to write its stacks; after that, its handler in C is used."""

NAME_SECONDS = 10.0
"""Approximate time for which a rank is marked before it is reported (telemetry/stragglers.py).

On a host with many more runnable processes than cores, one of two equal ranks was marked in 32% of intervals
of 20 steps and in 15% of those of 50, each time for some seconds.
"""

# The agent and its worker processes (launch/generations.py, workers.py, simulated.py; signals.py)

MONITOR_SECONDS = 0.02
"""Pause between two polls of the ranks. A rank's end wakes the agent; signals and alarms wait for a poll."""
MEMBERSHIP_SECONDS = 0.25
"""Pause between two checks for nodes that wait to join: one read of the store."""
STANDBY_SECONDS = 0.2
"""Pause between two forks of standby processes, 30 ms each: a training generation keeps its cores."""
LAST_MESSAGES_SECONDS = 0.5
"""Limit for sending a rank's last messages, if its agent is busy."""
LAST_MESSAGES_POLL_SECONDS = 0.005
"""Pause between two attempts to send them: the agent reads a message in much less."""
ENDING_SECONDS = 10.0
"""Limit for the other ranks after one has ended for good: rank 0 may be saving, and reports the error."""
UNMET_SECONDS = 3.0
"""Limit for ranks before their first step to exit by themselves after another node has ended the job.

Node 0 waits longer than this for the others to read the job result.
"""
KILLED_SECONDS = 10.0
"""Limit for a rank to be gone after SIGKILL. Only an uninterruptible wait for a volume takes longer."""
END_LOOK_SECONDS = 0.005
"""Pause between two checks whether killed processes are gone: a restart waits for them."""
PIPE_SECONDS = 1.0
"""Limit for a helper process to exit after its pipe closed: its exit code shows whether a signal ended it."""
CODE_RECORD_SECONDS = 1.0
"""Delay before a rank records what it has imported, which takes some 10 ms: a recovery would wait for it."""
JUST_AFTER_SECONDS = 0.3
"""Grace period after ranks succeed: processes that end within it are not reported as left behind."""
LEFT_BEHIND_SECONDS = 1.0
"""Pause between SIGTERM and SIGKILL for processes that successful ranks leave running."""
DISMISSED_SECONDS = 1.0
"""Limit for a standby process to be gone after its pipe was closed."""
LEAVING_SECONDS = 10.0
"""Limit for a failed script's threads and exit handlers, which may wait for peers that are gone."""
FINALIZATION_SECONDS = 3600
"""Limit for the end of a successful script that has no agent, if its main thread waits forever."""
BLAME_SECONDS = 5.0
"""Limit, after a script's rank has lost its peers, for the rank here that is the cause, if any, to end."""
OTHERS_SECONDS = 1.0
"""Limit, after a script's rank has failed or stopped, for another node or a signal to explain it."""
SUPERVISE_SECONDS = 0.1
"""Pause between two polls of the simulated nodes by their launcher."""
DEAF_NODE_SECONDS = 3.0
"""Extra time after --shutdown-timeout before a simulated node that has not stopped is killed."""
REPEAT_WINDOW_SECONDS = 2.0
"""Time within which stop signals count as one: a scheduler signals the whole tree, and the agent forwards."""
START_STOP_SECONDS = 1.0
"""Limit for ranks to exit after a stop before the first step. Once a step is finished, it is saved."""
MEET_TO_SAVE_SECONDS = 5.0
"""Limit for the other nodes to rejoin after a stop between generations. They join at once, or are gone."""
AT_ONCE_SECONDS = 3.0
"""Limit for a rank that exits at once to close its files; a volume may block that."""

# The last save of a run (checkpoint/writer.py)

SAVE_AGAIN_SECONDS = 2.0
"""Pause before each retry, of at most three, of the last save: a full volume may be freed meanwhile."""

SHARDS_POLL_SECONDS = 0.02
"""Pause between two checks whether the other ranks have written their shards: one small store request."""
SHARDS_LEFT_SECONDS = 8.0
"""Limit for the other ranks' shards once a run has failed; the agent waits longer for ranks to end."""

# Copies of a neighbor's shards (distributed/neighbor_link.py)

COPY_CONNECT_SECONDS = 10.0
"""Limit for connecting to the next node's rank, which already listens, and for its first message."""
COPY_RETRY_SECONDS = 1.0
"""Pause between two attempts to send a copy after the connection failed. Usually the other rank has ended."""

COPY_STUCK_SECONDS = 600.0
"""Time after a rank's own copy until it releases its slot: another rank cannot send its own."""

# Crash loops: starts that save nothing new (run/crash_loop.py)

FIRST_BACKOFF_SECONDS = 5.0
"""Pause before the third such start in a row; it doubles with each further one."""
LONGEST_BACKOFF_SECONDS = 120.0
"""Longest such pause: less than --master-timeout, for which the other nodes wait for node 0."""
STEADY_SECONDS = 600.0
"""Time after which a start is not part of a crash loop, whatever it has saved."""

# The rendezvous (launch/rendezvous.py, launch/generations.py)

STORE_READ_SECONDS = 60
"""Limit for a read of the agents' store. TCP alone would block on an unreachable node for 15 minutes."""
RENDEZVOUS_POLL_SECONDS = 0.05
"""Pause between two polls of the rendezvous, instead of torch's 1 s: one small read per node.

Longer among many nodes (`rendezvous_state.poll_intervals`).
"""
SHORTEST_LOOK_SECONDS = 0.001
"""First pause while a joined node is about to write its ranks; each further one is twice as long."""
KEEP_ALIVE_SECONDS = 1
"""Pause between two heartbeats of a node in the rendezvous; after KEEP_ALIVE_ATTEMPTS missed ones it is out.

Longer among many nodes.
"""
KEEP_ALIVE_ATTEMPTS = 5
TORCH_POLL_SECONDS = 1.0
TORCH_KEEP_ALIVE_SECONDS = 5
"""torch's own values for both, which are the upper limits here."""
BACKOFF_SECONDS_A_NODE = 0.02
"""Longest backoff, per node of the job, of a node whose write to the shared state came too late."""
LAST_CALL_SECONDS = 1
"""Time that an elastic rendezvous waits for more than MIN nodes; the first one waits FIRST_CALL_SECONDS."""
FIRST_CALL_SECONDS = 10.0
MASTER_ANSWER_SECONDS = 2.0
"""Limit for one attempt to connect to the master; each attempt resolves its name again."""
HANDSHAKE_SECONDS = 20.0
"""Limit for one message of the proof that a node knows the secret; the peer may be frozen for a while."""
QUIET_SECONDS = 60
"""Silence after which TCP checks whether the other end of a proxied connection is alive."""
REFUSED_RETRY_SECONDS = 1.0
"""Pause between two attempts of a refused node: the secret may be on its way, or too many nodes connect."""
MASTER_RETRY_SECONDS = 0.1
"""Pause between two attempts to connect to the master."""
WAITING_WORD_SECONDS = 5.0
"""Pause between two log lines about what a node is waiting for."""
LEAVE_SECONDS = 10.0
"""Time that node 0 keeps the store open so that the others can read the job result.

The grace period of the Kubernetes manifests includes it.
"""
CLOCK_LOOK_SECONDS = 2.5
"""Time that `doctor` watches the others' heartbeats in the store: two of each node."""
ANNOUNCE_SECONDS = 30.0
"""Time that a node announces an error before the start: others may still import torch, then wait in vain."""
LEFT_POLL_SECONDS = 0.02
"""Pause between two checks on node 0 whether all nodes have left."""

MEETING_FILE_SECONDS = 600.0
"""Limit for the ranks of one start to write the file that connects them (distributed/group_store.py)."""

# Spares (launch/spares.py)

SPARE_BEAT_SECONDS = 0.1
"""Pause between two reports of a node that its agent is alive, with spares. Longer among many nodes."""
SPARE_BEATS_MISSED = 10
"""Number of missed reports after which a node that the others wait for loses its place to a spare.

A node that was only slow becomes a spare, so nothing is lost; an earlier exchange would be needless.
"""
SPARE_TAKES_SECONDS = 30.0
"""Limit for a node with wrong results to get a spare; node 0 decides once its own ranks have ended."""
SPARE_WARM_SECONDS = 2.0
"""Pause before a waiting node forks its standby processes: a starting generation needs the cores."""
SPARES_LEAVE_SECONDS = 3.0
"""Limit for all spares to read the job result at the end: they read it every 0.1 s."""

# The lease on a run directory (run/lease.py)

OWNER_RENEW_SECONDS = 5.0
"""Pause between two renewals of the lease on a run directory. Another launch is refused within this time."""
OWNER_EXPIRY_SECONDS = 30.0
"""Age of an expired lease: six renewals. If its process is not visible either, the launch is dead."""
OWNER_LOOK_SECONDS = 0.2
"""Pause between two checks of such a lease."""

# The page and the probes (launch/view.py, report/, telemetry/health.py)

NODE_TICK_SECONDS = 1.0
"""Pause between two writes of a node's health.json, with updates of its time counters."""
PAGE_SECONDS = 5.0
"""Time within which an open page has polled; it polls every 2 s.

At the end, the run waits this long for the page's last poll.
"""
HOLD_SECONDS = 25.0
"""Time that a page's request stays open, waiting for the end of the run, before the page repeats it.

Proxies cut silent connections.
"""
STALE_SECONDS = 15.0
"""Age of a health.json at which `tandem health` reports a dead agent: 15 ticks, for busy hosts."""
RUN_HEALTH_SECONDS = 5.0
"""Pause between two heartbeats that node 0 writes to the run directory: the volume may be busy."""
RUN_HEALTH_STALE_SECONDS = 30.0
"""Age of such a heartbeat at which `tandem health RUN_DIR` reports a dead agent."""
SLACK_SECONDS = 60.0
"""Time from a state's limit until the run is unhealthy: probes kill nodes, so the watchdog acts first."""
GPU_SECONDS = 5.0
"""Pause between two NVML queries; a driver call may take tens of milliseconds."""
VOLUME_SECONDS = 15.0
"""The same without a GPU, when tandem queries only the volume's free space."""
LIST_SECONDS = 2.0
"""Largest age of the page's list of checkpoints: listing a network volume takes time."""
GIT_SECONDS = 10.0
"""Limit for git to name a commit, on a network volume; only a separate thread waits for it."""
REQUEST_SECONDS = 5.0
"""Limit for a client's request and its answer: slow clients must not hold all 32 connections."""

SETTLED_SECONDS = 3600.0
"""Time after which a run without a summary that writes nothing no longer counts as training."""
LEFT_OVER_SECONDS = 86_400.0
"""Age at which leftovers of saves to an object store, which no manifest names, are removed."""

# Trackers (report/tracking.py, launch/outgoing.py)

TRACKER_SECONDS = 2.0
"""Pause between two reads of new rows by the tracker's process: one small read of a file each."""
TRACKER_LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause between attempts to reach a tracker that does not answer; it starts at 2 s and doubles."""
TRACKER_RESTART_SECONDS = 1.0
"""Pause before a tracker's process that was killed is restarted; it doubles."""
OTEL_FILE_SECONDS = 1.0
"""Pause between two writes of the metrics for OpenTelemetry: a killed agent loses no more than this."""
OTEL_LAST_SECONDS = 5.0
"""Limit for the last write at the end of a launch, on a volume that may hang."""
OTEL_NOT_SERVED_SECONDS = 60.0
"""Pause before a collector that does not accept a kind of data gets it again: a 404 of a proxy may pass."""
OTEL_REQUEST_SECONDS = 10.0
"""Longest timeout of a request: metrics, traces and logs must all fit into TRACKER_END_SECONDS."""
OTEL_LONGEST_WAIT_SECONDS = 600.0
"""Longest Retry-After that is honored: a wrong header must not stop all sending."""
TRACKER_END_SECONDS = 30.0
"""Limit for the last rows at the end of a launch: one request of TRACKER_REQUEST_SECONDS, and one retry."""
TRACKER_ORPHAN_SECONDS = 35.0
"""The same if the agent was killed and cannot end the process: longer, so that a live agent acts first."""
TRACKER_RANKS_SECONDS = 1.0
"""Time after an agent was killed for its ranks to end as well and write their last rows."""
TRACKER_REQUEST_SECONDS = 8
"""Limit for a request to MLflow, unless MLFLOW_HTTP_REQUEST_TIMEOUT is set; MLflow's own default is 120."""

# Messages to a webhook, and to Kubeflow Trainer (report/sender.py)

OUTGOING_REQUEST_SECONDS = 10.0
"""Limit for the answer to one request; no rank and no agent waits for it."""
OUTGOING_RETRY_SECONDS = 2.0
"""Pause before the first retry after a failure that may pass; it doubles."""
OUTGOING_ARRIVAL_SECONDS = 0.25
"""Time after which a request that was sent has arrived, even if its answer takes longer."""
OUTGOING_END_SECONDS = 15.0
"""Limit for the last messages at the end of a launch: one pause of TRAINER_SECONDS, and one request."""
STOPPED_END_SECONDS = 7.0
"""The same after a stop signal, to fit the platform's grace period."""
TRAINER_SECONDS = 5.0
"""Pause between two requests to Kubeflow Trainer's status endpoint, which asks for no more (KEP-2779)."""
SAME_CAUSE_SECONDS = 600.0
"""Time within which a webhook gets at most one message about the same event and cause."""

# Replicas of Compose (platforms/compose.py)

RESOLVER_SECONDS = 2.0
"""Limit for an answer of Docker's resolver, which takes milliseconds; then it is queried again."""
STAY_DOWN_SECONDS = 60.0
"""Time after an end that no retry can fix, within which a restarted container exits at once."""

# verify-resume (verify/resume.py)

STEP_POLL_SECONDS = 0.001
"""Pause between two checks for the step at which to kill: a step of the smallest task takes 3 ms."""
END_POLL_SECONDS = 0.05
"""Pause between two checks whether a run has ended."""
AUDIT_POLL_SECONDS = 0.005
"""Pause between two checks of an audited program's files and steps, to kill it at a chosen step."""
RANK_KILLED_SECONDS = 60.0
"""Limit for the launcher of an audited program to end the other ranks after one was killed."""
SHORTEST_RESTART_SECONDS = 60.0
"""Shortest limit for a restart of an audited program, even if an uninterrupted run takes a second."""
CHECK_SAYS_SECONDS = 10.0
"""Silence after which `check` reports that a part is still running."""
CHECK_SECONDS = 600.0
"""Limit for a rank in `check` to build data, model and two batches: the first time may download."""

TOOL_ANSWER_SECONDS = 20.0
"""Limit for another program's --version or --help, in `tandem doctor`."""

# The node check (launch/join_check.py, join_measure.py): together under 3 s with eight nodes on two cores

JOIN_POLL_SECONDS = 0.01
"""Pause between two checks for the other nodes' answers: one small read."""
JOIN_SPEED_SECONDS = 0.2
"""Time for matrix products on a device: two periods of the kernel's CPU limit, which are 0.1 s by default."""
JOIN_LINK_SECONDS = 0.1
"""Time for bursts in one direction of a link: several of 20 ms."""
JOIN_PEER_SECONDS = 5.0
"""Limit for a message from the other end of a link: it connects at once, or cannot."""
JOIN_ANSWER_SECONDS = 20.0
"""Limit for a node's answer to one test. Longer than JOIN_PEER_SECONDS: a dead link is not a dead node."""

# Blocks of data from object stores (data/ranges.py, data/block_cache.py, data/block_fetcher.py)

BLOCK_DEADLINE_SECONDS = 60.0
"""Limit for all attempts to read a block, unless `tar_blocks` sets another: less than an idle hang."""
BLOCK_STALL_SECONDS = 10.0
"""Silence of a server after which the request is repeated on a new connection."""
BLOCK_BACKOFF_SECONDS = 0.1
"""Pause after the first failed request for a block; it doubles, up to LONGEST_BLOCK_BACKOFF_SECONDS."""
LONGEST_BLOCK_BACKOFF_SECONDS = 5.0
BLOCK_ROOM_SECONDS = 0.1
"""Pause between two checks whether a full cache has room for a block that is read ahead."""
BLOCK_POLL_SECONDS = 0.02
"""Longest pause between two checks of a reader for its block, at most a tenth of a request."""
BLOCK_USED_SECONDS = 1.0
"""Pause after which a reader sets a block's time of use again: eviction needs no finer order."""
BLOCK_AGAIN_SECONDS = 1.0
"""Time after which a reader asks for its block again: the cache may have evicted it in between."""
BLOCK_PARENT_SECONDS = 1.0
"""Pause between two checks of the fetching process whether its rank is alive."""
