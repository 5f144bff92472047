"""The training of one rank, from a plan and data to a model: data, model, engine, loop, final model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from frugal import memory_watch
from frugal.checkpoint import loading, manifest, mirror, random_state, resume_checks, run_folder, saving
from frugal.checkpoint.progress import Progress, read_progress
from frugal.config.learning_rate import Curve
from frugal.config.optimizers import IMPLEMENTATIONS
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.data import corpus
from frugal.data.batches import GlobalBatches
from frugal.data.sources import Provenance
from frugal.data.stream.samples import SampleStream, StreamBatches
from frugal.deepspeed_adapter import kernels
from frugal.distributed import env, rank_logs, rendezvous
from frugal.engine import loop
from frugal.engine.engine import Engine, initialize
from frugal.engine.evaluation import Best, Criterion
from frugal.engine.extensions.callbacks import Callbacks
from frugal.engine.extensions.metric import Metric
from frugal.engine.measure.run_gauge import RunGauge
from frugal.engine.reports import opening, trackers
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.engine.train_step import evaluate, refuse_other_model
from frugal.imports import collected_seldom
from frugal.models import factories, resolve
from frugal.models.loading import placed
from frugal.models.spec import ModelSpec
from frugal.planning.plan import Plan
from frugal.report import after_run


def check(request: Request, settings: RunSettings) -> None:
    """Refuse, before a plan is computed, what `train` refuses whatever the plan is, and no row of the data decides.

    Raises:
        RequestError: the model, its tokenizer, or the user's metric or callbacks cannot be trained with.
        PlanMismatchError: the run to resume is of another model, or was trained in another way.
    """
    for reference in filter(None, (settings.metric, *settings.callback)):
        factories.import_callable(reference)
    spec = resolve.resolve_request(request)
    spec.refuse_random_base()
    if not corpus.samples_in(spec, settings):
        spec = spec.for_tokenizer(corpus.tokenizer_for(spec, settings.tokenizer, settings.chat_template)[0])
    _check_resumed(spec, request, settings)


def _check_resumed(spec: ModelSpec, request: Request, settings: RunSettings, plan_digest: str = "") -> None:
    """Refuse what the newest checkpoint of a run to resume does not continue with, before any weights are loaded.

    Without a plan the number of classes is not known, so the shapes of a classifier are not compared.

    Raises: as `resume_checks.check_progress`, `resume_checks.check_resume`.
    """
    path = manifest.newest_checkpoint(settings.checkpoints) if settings.resume else None
    if path is None:
        return
    try:
        made_by, progress = manifest.read(path), read_progress(path)
    except ValueError:  # an older one is loaded then
        return
    resume_checks.check_progress(progress, settings.out, settings.seed, settings.steps)
    recipe, shapes = resume_checks.recipe(request), made_by.shapes
    if made_by.recipe.get("optimizer") not in IMPLEMENTATIONS:  # of the model's own file, which is made with the engine
        recipe["optimizer"] = made_by.recipe.get("optimizer")
    if plan_digest != made_by.plan_digest and (plan_digest or spec.task != "sequence-classification"):
        module = spec.build(dtype=kernels.DTYPES[request.precision], device="meta")
        shapes = manifest.digest_of([(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()])
    resume_checks.check_resume(path, made_by, replace(made_by, model=request.model, recipe=recipe, shapes=shapes))


def check_schedule(request: Request, settings: RunSettings) -> None:
    """Refuse, before a plan is computed, a schedule that is longer than the run: the data say how long an epoch is.

    Raises:
        RequestError: the data cannot be used, or have too few samples.
    """
    if settings.steps is None and request.lengths is not None:
        batches = GlobalBatches(
            corpus.read_training_data(request, settings)[1].train, global_tokens=request.global_tokens,
            global_batch=request.batch_samples if request.global_tokens is None else None,
        )  # fmt: skip
        settings.schedule.curve(request.scaled_learning_rate, loop.num_steps(batches, settings), settings.warmup)


def train(plan: Plan, settings: RunSettings, device: torch.device) -> None:
    """Train on ranks that have joined, and write the final model. Collective.

    Raises: as `frugal.engine.run.run`.
    """
    if (rank := env.rank()) == 0:
        trackers.check(settings.track)
        settings.check_addresses()
        mirror.fetch_if_empty(settings.mirror if settings.resume else None, settings.out)
    if settings.mirror is not None:
        rendezvous.wait_for_all("mirror")
    metric, callbacks = Metric.load(settings.metric), Callbacks.load(settings.callback)
    settings = run_folder.create(settings)
    run_folder.check_space(plan, settings)
    with collected_seldom():  # reading brings transformers and datasets along
        data = corpus.read_samples(plan, settings)
    data.spec.refuse_random_base()
    _check_resumed(data.spec, plan.request, settings, plan.digest)
    batches = _global_batches(plan, settings, data)
    total_steps = loop.num_steps(batches, settings)
    curve = settings.schedule.curve(plan.request.scaled_learning_rate, total_steps, settings.warmup)
    # The loop takes the gauge off after two steps; the folder stays ours to the end.
    with run_folder.locked(settings) if rank == 0 else nullcontext(), ExitStack() as measuring:
        if plan.batch.world_size == 1:  # several have their logs since they joined
            rank_logs.redirect(settings.out, rank)
        gauge = measuring.enter_context(memory_watch.gauge(device))
        model = placed.build(data.spec, plan, device, seed=settings.seed)
        factories.refuse_shapes_only(plan.request.model, model)
        if plan.model.task != "sequence-classification":  # the number of classes comes from the data
            refuse_other_model(plan, model)
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
        size = plan.batch.largest_micro_batch, -(-plan.request.seq_len // plan.batch.sequence_parallel)
        asked = trackers.hyperparameters(plan, settings.of_run)
        with (
            mirror.beside(settings.mirror if rank == 0 else None, settings.out, settings.grace) as copy,
            _page_afterwards(settings.out, rank),
            Log(
                settings.out, rank=rank, planned=PlannedMemory(plan.memory.live_bytes, size, plan.memory.phase_peaks),
                total_steps=total_steps, first_step=start.step,
                trackers=trackers.Trackers(settings.track, settings.out, asked, start.step) if rank == 0 else None,
            ) as log,
        ):  # fmt: skip
            log.published = copy
            log.start(**opening.record(plan, changes, is_resumed=settings.resume))
            said = opening.lines(plan, settings.too_long, settings.out, data, model, total_steps, start.step, changes)
            for line in (*said, *opening.remarks(plan, data, device, rank)):
                log.say(line)
            if settings.resume and device.type == "cpu":
                measuring.close()  # no operator makes storages that are read from a checkpoint: it would miss them
                run_gauge = RunGauge(engine)
            else:
                run_gauge = RunGauge(engine, gauge, measuring)
            done = loop.train(
                engine, batches, settings, log, start=start, total_steps=total_steps, gauge=run_gauge,
                evaluate=partial(engine.evaluate, data.validation, metric) if len(data.validation) else None,
            )  # fmt: skip
            best = Best(Criterion.of(settings.best, settings.metric), settings.patience, done.best)
            if best.is_over:
                log.say(f"step {done.step}/{total_steps}  {best.why_over}")
            if done.step == total_steps or best.is_over:
                step = _load_best(engine, settings.checkpoints, best, log) if settings.save_best_model else done.step
                evaluate_at_the_end(engine, data, step, log, metric)
                model_path = settings.out / "model"
                folder = saving.save_model(engine, model_path, data.tokenizer, uses_cache=data.spec.uses_cache)
                log.say(f"model written to {folder}")
                log.ends("done", best.why_over if best.is_over else "")
            else:
                saved = f"step {done.step} is saved in {settings.checkpoints.absolute()}"
                log.say(f"told to stop: {saved}, continue with --resume")
                log.ends("stopped")
        engine.destroy()


@contextmanager
def _page_afterwards(out: Path, rank: int) -> Iterator[None]:
    """Have rank 0 write the page of the run in `out` after the `with` block, also if that fails."""
    try:
        yield
    finally:
        if rank == 0 and out.is_dir() and (why := after_run.write_page(out)) is not None:
            rank_logs.to_console(f"note: {after_run.PAGE} could not be written ({why}); `frugal report` makes it")


def _load_best(engine: Engine, checkpoints: Path, best: Best, log: Log) -> int:
    """Load the weights of the best of the checkpoints, and return its number of steps."""
    path = saving.best_of(manifest.checkpoints_in(checkpoints), best.criterion.score)
    loaded = loading.load(engine, checkpoints, only=None if path is None else path.name)
    log.say(f"the model is that of step {loaded.progress.step}, the best by {best.criterion.name or 'the metric'}")
    return loaded.progress.step


def evaluate_at_the_end(
    engine: Engine, data: corpus.RunData, total_steps: int, log: Log, metric: Metric | None = None
) -> None:
    """Evaluate the test data, and as many training samples as there were for validation."""
    if len(data.test) == 0:
        return
    known: Sequence[Any] = ()
    if not isinstance(data.training, SampleStream):  # which is read once
        known = corpus.Subset.drawn_from(data.training, len(data.validation) or len(data.test))
    for name, samples in (("train", known), ("test", data.test)):
        if len(samples) > 0:
            log.evaluation(total_steps, evaluate(engine, samples, metric), of=name)


def _global_batches(plan: Plan, settings: RunSettings, data: corpus.RunData) -> GlobalBatches | StreamBatches:
    tokens = plan.batch.global_tokens
    samples = plan.batch.global_batch if tokens is None else None
    if settings.stream:
        return StreamBatches(data.training, plan.model.task, global_batch=samples, global_tokens=tokens)
    return GlobalBatches(data.training, global_batch=samples, global_tokens=tokens, seed=settings.seed)


def _start(
    engine: Engine, settings: RunSettings, data: Provenance, curve: Curve, total_steps: int
) -> tuple[Progress, tuple[str, ...]]:
    """Return where to begin, and what is not as it was when the run stopped.

    Raises:
        FrugalError: as `loading.load`, `resume_checks.check_progress` and `resume_checks.on_data`.
    """
    if not settings.resume:
        return Progress(step=0, seed=settings.seed, data=data, learning_rate=curve), ()
    loaded = loading.load(engine, settings.checkpoints)
    resume_checks.check_progress(loaded.progress, settings.out, settings.seed, total_steps)
    start, data_changes = resume_checks.on_data(
        loaded.progress, data, settings.out, accepts_changes=settings.accept_changed_data
    )
    start, rate_changes = resume_checks.on_curve(start, curve)
    return start, loaded.changes + data_changes + rate_changes
