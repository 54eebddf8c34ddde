"""The loop: batch -> step -> log -> evaluate -> checkpoint, for every stage, until the run is finished or stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext

from danlu.core.errors import DanluError, ResourceError, TrainingError
from danlu.optim.schedules import multiplier
from danlu.parallel.phase import PHASE
from danlu.training.diagnosis import explain_gradient, explain_weights, non_finite_on_any
from danlu.training.evaluation import Scores, evaluate
from danlu.training.metrics import Value
from danlu.training.out_of_memory import OutOfMemory, is_out_of_memory, out_of_memory_message
from danlu.training.state import Run, Samples, restore, shard_boxes, snapshot
from danlu.training.step import StepGradients, StepObserver, accumulate
from danlu.training.step_record import has_spiked, log_step, pass_over


def fit(run: Run) -> None:
    """Trains until the last step, an early stop, or a signal; the state at the end is always saved.

    Work that is due after a step is done before the next one begins, so a run that a signal cut off in between starts
    with it. Raises TrainingError for numbers that are not finite and for spikes past their policy, and any DanluError
    of an evaluation or the data; the state before it is saved first, if it is finite itself, and not one between the
    flushes of PipeDream. KeyboardInterrupt passes through at once, leaving the last checkpoint.
    """
    try:
        while not run.stopping():
            scores, late = None, False
            if run.due(run.cadence.evaluation, since=run.state.assessed_step):
                scores = assess(run)
                # Saved for a signal, before it was known what this state is worth.
                late = run.state.saved_step == run.state.assessed_step == run.state.step
            if run.due(run.cadence.checkpoint, since=run.state.saved_step) or late or best(run, scores):
                save(run, scores)
            if run.finished or run.stopping():
                break
            take_step(run)
    except DanluError as error:
        # Saving is done together: of several processes all have a TrainingError, of another kind perhaps one alone.
        is_everyones = run.learner.parallel.alone or isinstance(error, TrainingError)
        from danlu.training.pipedream import UnfinishedTurn

        if is_everyones and not isinstance(error, UnfinishedTurn):
            save_before(run, error)
        raise
    if run.state.step > run.state.saved_step:
        save(run)


def take_step(run: Run) -> None:
    """One optimizer step, or the steps up to the next flush; or back to the last checkpoint, when the watch wants that.

    Raises TrainingError, the DataError of a stream, or OutOfMemory, having put back everything that a checkpoint would
    keep of the step. Where memory runs out in the update itself, which changes parameters one by one, the allocator's
    own error passes: that state must not be saved.
    """
    before = run.state.step
    try:
        if run.learner.parallel.updates_each_micro_batch:
            from danlu.training.pipedream import train_turn

            train_turn(run)
        else:
            train_step(run)
    except DanluError:
        _put_back(run, before)
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or run.state.step != before:
            raise
        lacking = OutOfMemory(out_of_memory_message(error))
    else:
        return
    # Out here the error is gone, and with it the frames that hold what took the memory.
    _put_back(run, before)
    raise lacking


def _put_back(run: Run, before: int) -> None:
    run.optimizer.zero_grad()
    run.data_loader.give_back()
    run.state.step = before


def train_step(run: Run, observer: StepObserver | None = None) -> StepGradients | None:
    """Forward and backward passes, clipping and the update of one step; None where it had nothing to train on.

    A step without trained weight, as long context without targets can fill one, or without anything that its objective
    takes a mean over, is passed over and reported: nothing is updated. `observer` looks at the gradients on the way
    (`danlu verify` proves this very function by it).
    Raises TrainingError for numbers that are not finite.
    """
    started = time.perf_counter()
    step = run.state.step + 1
    items = run.data_loader.take(step)
    totals = run.learner.totals(items)
    if not totals.has_targets:
        pass_over(run, items, totals)
        return None
    scale = 1.0 if run.scaler is None else run.scaler.scale
    if run.timeline is not None:
        run.timeline.begin(step)
    gradients = accumulate(
        run.learner,
        items,
        step=step,
        clip=run.clip,
        totals=totals,
        loss_scale=scale,
        holders=run.optimizer.gradient_holders(),
        roles=None if run.roles is None else run.roles.gradients(run.optimizer.named_gradient_holders(), step),
        observer=observer,
        timeline=run.timeline,
    )
    finite = math.isfinite(gradients.norm)
    if not finite and run.scaler is None:
        world = run.learner.parallel.ranks.world
        raise explain_gradient(non_finite_on_any(world, run.optimizer.named_gradients()), items, step)
    run.optimizer.set_learning_rate(multiplier(step, run.cadence.total, run.schedule))
    run.state.step = step
    updates = finite and not has_spiked(run, gradients)
    if run.state.rewind_wanted:
        rewind(run)
        return gradients
    if run.scaler is not None and (change := run.scaler.update(step, finite)) is not None:
        run.record("overflow" if change.overflow else "loss_scale", before=change.before, after=change.after)
    if updates:
        PHASE.begin("optimizer")
        with nullcontext() if run.timeline is None else run.timeline.timed("update"):
            run.optimizer.step(free_gradients=True)
        if run.ema is not None:
            run.ema.update()
        run.learner.updated(step)
        run.learner.parallel.release_pages()
        if run.timeline is not None:
            run.timeline.end()
    run.optimizer.zero_grad()
    run.state.tokens += totals.tokens
    if run.due(run.cadence.log, since=step - 1):
        log_step(run, gradients, time.perf_counter() - started)
    return gradients


def rewind(run: Run) -> None:
    """Back to the last ordinary checkpoint, with the rows of the present step left out from now on."""
    run.state.rewind_wanted = False
    run.optimizer.zero_grad()
    spiked_at, rows = run.state.step, run.data_loader.last_taken
    rewinds = run.state.rewinds + 1
    if rewinds > run.watch.section.rewinds:
        raise TrainingError(
            f"step {spiked_at}: a spike after going back {rewinds - 1} times (watch.rewinds). "
            "Lower optimizer.learning_rate, look at the events in metrics.jsonl, or choose another watch.policy."
        )
    complete = [info for info in run.store.checkpoints() if info.complete]
    # Rather not to one that only a signal caused: an uninterrupted run would not have it.
    ordinary = [info for info in complete if info.step % run.cadence.checkpoint == 0]
    if not complete:
        raise TrainingError(
            f"step {spiked_at}: a spike, and no checkpoint to go back to yet. "
            "Lower checkpoint.every, or choose watch.policy: warn or skip."
        )
    checkpoint = (ordinary or complete)[-1]
    excluded = run.data_loader.excluded | set(rows)
    # Told before going back, while the step is still the one that spiked.
    run.record("rewind", back_to=checkpoint.step, packs_left_out=len(excluded))
    restore(run, checkpoint.path)
    run.data_loader.excluded = excluded
    run.state.rewinds = rewinds


def assess(run: Run) -> Scores | None:
    """Evaluates, writes samples, and keeps count for the early stop.

    A signal that comes meanwhile leaves all of it undone: saving does not wait, and a resumed run repeats it. So does a
    DanluError, such as a sample that is not finite: it is raised on all processes once the state has been saved.
    """
    started = time.perf_counter()
    PHASE.begin("evaluation", run.state.step)
    scores: Scores | None = None
    samples = Samples(())
    problem: DanluError | None = None
    with run.averaged():
        try:
            scores = None if run.held_out is None else evaluate(run.learner, run.held_out(), stop=run.stopping)
            if run.stopping():
                return None
            if run.generate is not None and run.sample_prompts:
                samples = run.generate(run.sample_prompts)
        except DanluError as error:
            problem = error
        run.learner.parallel.reshard()
    if (agreed := run.agreed(problem)) is not None:
        failure = agreed.kind(f"step {run.state.step}, while evaluating: {agreed.text}")
        save_before(run, failure)
        raise failure from problem
    run.state.assessed_step = run.state.step
    for prompt, text in zip(run.sample_prompts, samples.texts, strict=False):
        run.record("sample", prompt=prompt, text=text)
    if samples.values:
        run.record("samples", **samples.values)
    if scores is None:
        return None
    values: Mapping[str, Value] = {**scores.values(), "s": time.perf_counter() - started}
    for recorder in run.recorders:
        recorder.evaluation(run.state.step, values)
    _judge(run, scores.judged_by(run.criterion))
    return scores


def _judge(run: Run, value: float) -> None:
    """Keeps count of evaluations since the best one, by the run's criterion, and ends the run after too many."""
    state, patience = run.state, run.early_stop
    if run.criterion.is_better(value, state.best_value, patience.min_delta if patience else 0.0):
        state.best_value, state.best_metric = value, run.criterion.metric
        state.evaluations_without_gain = 0
        return
    state.evaluations_without_gain += 1
    if patience is not None and state.evaluations_without_gain >= patience.patience:
        state.ended_early = True
        best = math.nan if state.best_value is None else state.best_value
        run.record("early_stop", **{f"best_{run.criterion.metric}": best}, evaluations=state.evaluations_without_gain)


def best(run: Run, scores: Scores | None) -> bool:
    """Whether this state is to be kept as the best, which may lie between two ordinary checkpoints."""
    if scores is None or not run.store.keep_best:
        return False
    known = run.store.best()
    return known is None or run.criterion.is_better(scores.judged_by(run.criterion), known.value_by(run.criterion))


def save(run: Run, scores: Scores | None = None) -> None:
    """A checkpoint of the present state; metrics are on disk before it, so it never outlives them.

    Raises TrainingError for weights that are not finite: they would take the place of good ones.
    """
    PHASE.begin("checkpoint", run.state.step)
    if (broken := broken_weights(run)) is not None:
        raise broken
    run.state.saved_step = run.state.step
    run.store.make_room()  # for the lines of metrics too
    if (unwritten := run.agreed(_sync_metrics(run))) is not None:
        raise unwritten.kind(unwritten.text)
    groups, state = snapshot(run)
    loss, value = (None, None) if scores is None else (scores.loss, scores.judged_by(run.criterion))
    run.store.save(run.state.step, groups, state, loss=loss, value=value, boxes=shard_boxes(run, groups))
    run.learner.parallel.release_pages()


def _sync_metrics(run: Run) -> ResourceError | None:
    """Returns why not every line of metrics is on the disk; None where all are, or this process writes none."""
    try:
        if run.metrics is not None:
            run.metrics.sync()
    except ResourceError as error:
        return error
    return None


def save_before(run: Run, error: DanluError) -> None:
    """Saves the present state before `error` ends the run, unless it is saved already or its weights are not finite.

    An error of saving is appended to `error` and does not replace it.
    """
    if run.state.step <= run.state.saved_step or broken_weights(run) is not None:
        return
    try:
        save(run)
        run.store.wait()
    except DanluError as second:
        raise type(error)(f"{error}\nNor could the state of step {run.state.step} be saved: {second}") from error


def broken_weights(run: Run) -> TrainingError | None:
    """Names the weights that are not finite, on any process; None where all are finite."""
    names = non_finite_on_any(run.learner.parallel.ranks.world, run.learner.weights().items())
    return explain_weights(names, run.state.step)
