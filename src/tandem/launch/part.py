"""What an agent works with: this node's part of a job."""

from dataclasses import dataclass

from tandem.checkpoint.claim import Claim
from tandem.checkpoint.decision import ResumeDecision
from tandem.config.slices import LaunchConfig
from tandem.launch.meeting_place import MeetingPlace
from tandem.launch.view import NodeView
from tandem.launch.workers import Workers
from tandem.platforms.placement import Placement
from tandem.signals import StopFlag


@dataclass(frozen=True)
class Node:
    """This node's part of a job, as every agent of it works with it.

    `claim` is that of node 0 on the run directory; other nodes' has no token.
    """

    placement: Placement
    nproc: int
    config: LaunchConfig
    workers: Workers
    view: NodeView
    stop: StopFlag
    resume: ResumeDecision
    claim: Claim
    place: MeetingPlace
