"""The training of one rank, from a plan and data to a model: data, model, engine, loop, final model."""

from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch import nn

from frugal import memory_watch
from frugal.checkpoint import loading, mirror, random_state, resume_checks, run_folder
from frugal.checkpoint.progress import Progress
from frugal.config.learning_rate import Curve
from frugal.config.run_settings import RunSettings
from frugal.data import corpus
from frugal.data.batches import GlobalBatches
from frugal.data.corpus import RunData
from frugal.data.sources import Provenance
from frugal.data.stream.samples import StreamBatches
from frugal.distributed import env, rank_logs, rendezvous
from frugal.engine import final_model, loop
from frugal.engine.engine import Engine, initialize
from frugal.engine.extensions.best import Best
from frugal.engine.extensions.callbacks import Callbacks
from frugal.engine.extensions.metric import Metric
from frugal.engine.measure import tuner
from frugal.engine.measure.run_gauge import RunGauge
from frugal.engine.reports import endings, opening, trackers
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.errors import PlanMismatchError, RequestError
from frugal.imports import collected_seldom
from frugal.models import factories
from frugal.models.loading import placed, quantised
from frugal.planning.plan import Plan


def train(plan: Plan, settings: RunSettings, device: torch.device) -> None:
    """Train on ranks that have joined, and write the final model. Collective.

    Raises: as `frugal.engine.run.run`.
    """
    if (rank := env.rank()) == 0:
        trackers.check(settings.track)
        settings.check_addresses()
        mirror.fetch_if_empty(settings)
    if settings.mirror is not None:
        rendezvous.wait_for_all("mirror")
    metric, callbacks = Metric.load(settings.metric), Callbacks.load(settings.callback)
    settings = run_folder.create(settings)
    plan = tuner.plan_to_resume(plan, settings.out) if settings.resume else plan
    run_folder.check_space(plan, settings)
    data = _read_samples(plan, settings)
    _check_validation(settings, data)
    batches = _global_batches(plan, settings, data)
    total_steps = loop.num_steps(batches, settings)
    curve = settings.schedule.curve(plan.request.scaled_learning_rate, total_steps, settings.warmup)
    # The loop takes the gauge off after two steps; the folder stays ours to the end.
    with run_folder.locked(settings) if rank == 0 else nullcontext(), ExitStack() as measuring:
        if plan.batch.world_size == 1:  # several have their logs since they joined
            rank_logs.redirect(settings.out, rank)
        gauge = measuring.enter_context(memory_watch.gauge(device))
        model = placed.build(data.spec, plan, device, seed=settings.seed)
        _refuse_other_model(plan, model)
        objective = data.spec.objective(
            data.tokenizer,
            seed=settings.seed,
            pack=bool(plan.request.pack),
            document_tokens=plan.request.document_tokens,
        )
        engine = initialize(model, plan, objective, learning_rate_schedule=curve.factor, callbacks=callbacks)
        random_state.seed_all(settings.seed * 1_000_003 + rank)
        start, changes = _start(engine, settings, data.provenance, curve, total_steps)
        if rank == 0:
            run_folder.record(plan, settings)
        with (
            mirror.beside(settings, rank) as copy,
            endings.page_afterwards(settings.out, rank),
            _log(plan, settings, rank, start.step, total_steps) as log,
        ):
            log.published = copy
            log.start(**opening.record(plan, changes, is_resumed=settings.resume))
            said = opening.lines(plan, settings, data, model, total_steps, start.step, changes)
            for line in (*said, *opening.remarks(plan, data, device, rank)):
                log.say(line)
            if settings.resume and device.type == "cpu":
                measuring.close()  # no operator makes storages that are read from a checkpoint: it would miss them
                run_gauge = RunGauge(engine)
            else:
                run_gauge = RunGauge(engine, gauge, measuring)
            engine.tuner = tuner.tuner_of_run(engine, settings, log, total_steps - start.step)
            evaluate = partial(engine.evaluate, data.validation, metric) if len(data.validation) else None
            done = loop.train(
                engine, batches, settings, log,
                start=start, total_steps=total_steps, evaluate=evaluate, gauge=run_gauge,
            )  # fmt: skip
            best = Best(settings, done)
            if best.is_over:
                log.say(f"step {done.step}/{total_steps}  {best.why_over}")
            if done.step == total_steps or best.is_over:
                final_model.finish(engine, settings, data, done.step, best, log, metric)
                log.ends("done", best.why_over if best.is_over else "")
            else:
                saved = f"step {done.step} is saved in {settings.checkpoints.absolute()}"
                log.say(f"told to stop: {saved}, continue with --resume")
                log.ends("stopped")
        engine.destroy()


def _log(plan: Plan, settings: RunSettings, rank: int, first_step: int, total_steps: int) -> Log:
    asked = trackers.hyperparameters(plan, settings)
    size = plan.batch.largest_micro_batch, plan.batch.part_of(plan.request.seq_len)
    return Log(
        settings.out, rank=rank, planned=PlannedMemory(plan.memory.live_bytes, size, plan.memory.phase_peaks),
        total_steps=total_steps, first_step=first_step,
        trackers=trackers.Trackers(settings.track, settings.out, asked, first_step) if rank == 0 else None,
    )  # fmt: skip


def _read_samples(plan: Plan, settings: RunSettings) -> RunData:
    with collected_seldom():  # reading brings transformers and datasets along
        data = corpus.read_samples(plan, settings)
    data.spec.refuse_random_base()
    return data


def _global_batches(plan: Plan, settings: RunSettings, data: RunData) -> GlobalBatches | StreamBatches:
    tokens = plan.batch.global_tokens
    samples = plan.batch.global_batch if tokens is None else None
    if settings.stream:
        return StreamBatches(data.training, plan.model.task, global_batch=samples, global_tokens=tokens)
    return GlobalBatches(data.training, global_batch=samples, global_tokens=tokens, seed=settings.seed)


def _check_validation(settings: RunSettings, data: RunData) -> None:
    asked = {"--metric": settings.metric, "--patience": settings.patience, "--best": settings.best}
    flag = next((flag for flag, value in asked.items() if value), None)
    if flag is not None and len(data.validation) == 0:
        raise RequestError(
            f"{flag} was given, and no sample is kept for validation",
            because=f"--validation-data is {', '.join(settings.validation_data)}",
            hint="give validation data, or a larger part of the data",
        )


def _refuse_other_model(plan: Plan, model: nn.Module) -> None:
    factories.refuse_shapes_only(plan.request.model, model)
    number = sum(map(quantised.elements, model.parameters()))
    if plan.model.task == "sequence-classification":
        return  # the number of classes comes from the data
    if plan.model.parameters not in (0, number):
        raise PlanMismatchError(
            f"the plan is for another model than {plan.request.model} is now",
            because=f"it was made for {plan.model.parameters:,} parameters, the model has {number:,}",
            hint="plan again",
        )


def _start(
    engine: Engine, settings: RunSettings, data: Provenance, curve: Curve, total_steps: int
) -> tuple[Progress, tuple[str, ...]]:
    """Return where to begin, and what is not as it was when the run stopped.

    Raises:
        RequestError: it is further than it is to go; and as `loading.load`, `resume_checks.on_data`.
    """
    if not settings.resume:
        return Progress(step=0, seed=settings.seed, data=data, learning_rate=curve), ()
    loaded = loading.load(engine, settings.checkpoints)
    if loaded.progress.step > total_steps:
        raise RequestError(
            f"the run in {settings.out} is at step {loaded.progress.step} already",
            because=f"it was to end at step {total_steps}",
            hint=f"resume with --steps {loaded.progress.step + 1} or more; `frugal export` writes its model",
        )
    start, data_changes = resume_checks.on_data(loaded.progress, data, settings)
    start, rate_changes = resume_checks.on_curve(start, curve)
    return start, loaded.changes + data_changes + rate_changes
