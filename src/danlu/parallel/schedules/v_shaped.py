"""Computations of schedules that place chunks in a V: ZBV and DualPipeV.

Rank r of p holds chunk r, through which the forward pass goes down, and chunk 2p - 1 - r, through which it comes up.
"""

from __future__ import annotations

from danlu.parallel.schedules.compute_order import ComputeOrder


def zbv(order: ComputeOrder, rank: int, stages: int, micro_batches: int) -> None:
    """ZB-V (arXiv:2401.10241, section 6 and figure 5): from 2p micro-batches on, a rank never waits once it has begun.

    The paper gives the schedule as a picture. It is that of torch's ZBVZeroBubble, but for the order of the last
    weight gradients: they are taken in the order in which they were put off, which needs one queue and frees the
    oldest activations first.
    """
    down, up = rank, 2 * stages - 1 - rank
    for _ in range(2 * (stages - rank) - 1):  # until micro-batch 0 is back from the last rank
        order.forward(down)
    for _ in range(rank):
        order.forward(up)
        order.forward(down)
    for _ in range(stages - rank):  # until the gradient of micro-batch 0 has turned at the last rank
        order.forward(up)
        order.input(up)
        order.weight()
    while order.backwards_left(up) > rank:
        order.forward(down)
        order.input(down)
        order.weight()
        order.forward(up)
        order.input(up)
        order.weight()
    for _ in range(rank):  # earlier ranks wait for these input gradients: weight gradients can wait
        order.input(down)
        order.input(up)
    while order.backwards_left(down):
        order.input(down)
        order.weight()
    while order.weights_left:
        order.weight()


def dualpipev(order: ComputeOrder, rank: int, stages: int, micro_batches: int) -> None:
    """DualPipeV, the V-shaped half of DeepSeek-V3's DualPipe (arXiv:2412.19437, section 3.2.1): needs m >= 2p.

    A forward of one chunk stands next to the backward of the other, so that an executor which computes both at once
    hides the messages of each behind the other. Here they are two actions, one after the other.
    """
    down, up = rank, 2 * stages - 1 - rank
    after = stages - 1 - rank  # ranks behind this one
    for _ in range(2 * after):
        order.forward(down)
    for _ in range(rank + 1):
        order.forward(down)
        order.forward(up)
    for _ in range(after):
        order.input(up)
        order.weight()
        order.forward(up)
    for _ in range(micro_batches - 2 * stages + rank + 1):
        order.forward(down)
        order.backward(up)
        order.forward(up)
        order.backward(down)
    for _ in range(after):
        order.backward(up)
        order.forward(up)
        order.backward(down)
    for count in range(2 * (rank + 1)):  # the first half whole; of the second the weight gradients are put off
        backward = order.backward if count <= rank else order.input
        backward(down if count % 2 else up)
    for _ in range(after):
        order.weight()
        order.input(down)
    while order.weights_left:
        order.weight()
