"""Usual causes that do not depend on the numbers that were found, as text."""

from __future__ import annotations

WHERE_CUT = (
    "a document that is cut over context ranks: positions or frequencies that begin again at a cut, a window that is "
    "off by one there, a length of the part on a rank in place of the document's, a target that is lost between two "
    "chunks, documents that see each other, a sink on each rank"
)
OTHER_VERSION = (
    "a backward pass with other weights than its forward pass: each micro-batch keeps, on each stage, the version that "
    "it began with, and an update must leave those alone that micro-batches in flight will go back through"
)
NOT_REPLAYED = "tokens that do not go to the experts that their rollout says they went to"
_TOGETHER = (
    "what one process can do fails where several do it together: parts that overlap or leave a gap, or state that is "
    "kept of one process's parameters alone"
)
CAUSES = {
    "metrics": (
        "a metric of one process's rows alone: the sums of its terms and of their weights are to be added up over data "
        "and context ranks, and divided then"
    ),
    "moving average": (
        "the weights are right and their moving average is not: updates that are not counted, or taken in twice"
    ),
    "saved average, loaded": (
        "the moving average does not come back as it was saved: its tensors, or how many updates it has taken in"
    ),
    "counters": (
        "a counter of the run that is added up on each process, over what only one of them has or over all of them"
    ),
    "saved counters, loaded": ("the run's counters or its place in the data do not come back as they were saved"),
    "saving": _TOGETHER,
    "exporting": _TOGETHER,
    "loading": _TOGETHER,
    "exported result": (
        "the checkpoint is right and the exported result is not: parts that are gathered from other processes into "
        "another place, or changed on the way"
    ),
    "gradient not finite": (
        "a number that is not finite on one process is hidden from others: the norm that decides on a step has to be "
        "the same on all, and not finite where any part of it is not"
    ),
}
"""The usual cause, by the kind of the faulty tensor (`comparison.ComparedTensor.kind`)."""
