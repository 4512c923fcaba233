"""HPWrapper's handlers and arguments, in this process."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Optional

import pytest
import torch

from hyperpod_ext.compat.checkpointless import handlers, logs
from hyperpod_ext.compat.checkpointless.wrap import CheckpointManager, HPCallWrapper, HPWrapper, current_run
from hyperpod_ext.config.job.runtime import ENV_RUNTIME
from hyperpod_ext.errors import ConfigError, JobFailedError
from hyperpod_ext.runtime.process_group.backend import AbortStuckError


class Own(handlers.Abort):
    """A handler of a script."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def __call__(self, state: Any = None, *_: Any, **__: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return self


def test_handlers_are_called_last_first_and_all_of_them() -> None:
    first, last = Own(), Own()
    assert handlers.Compose(first, last)() == [last, first]
    with pytest.raises(ExceptionGroup) as raised:
        handlers.Compose(Own(ValueError("a")), last, Own(TypeError("b")))()
    assert [type(each) for each in raised.value.exceptions] == [TypeError, ValueError]


def test_abort_handlers_are_chosen_and_replaced() -> None:
    manager, own = handlers.CheckpointlessAbortManager, Own()
    default = manager.get_default_checkpointless_abort()
    changed = manager.override_abort(default, handlers.HPCheckpointingAbort, own)
    assert [each is own for each in changed.instances] == [False, True, False, False]
    assert manager.create_custom_abort(own).instances == (own,)
    with pytest.raises(ValueError, match="At least one"):
        manager.create_custom_abort()


def test_a_finalizer_has_a_time_limit() -> None:
    called = []
    handlers.ThreadedFinalize(timedelta(seconds=60), called.append, (3,))(None)
    assert called == [3]
    never = threading.Event()
    with pytest.raises(JobFailedError, match="took longer"):
        handlers.ThreadedFinalize(timedelta(0), never.wait)(None)
    never.set()
    with pytest.raises(ZeroDivisionError):
        handlers.ThreadedFinalize(timedelta(seconds=60), lambda: 1 / 0)(None)


def test_handlers_without_a_call_are_refused() -> None:
    for base in (handlers.Abort, handlers.Finalize, handlers.HealthCheck):
        with pytest.raises(TypeError, match="__call__"):
            type("Empty", (base,), {})()


def test_a_gpu_that_does_not_answer_costs_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    never, waited = threading.Event(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    handlers.CudaHealthCheck()(None)
    assert waited == [torch.device("cuda", 1)] * 2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: never.wait())
    with pytest.raises(AbortStuckError, match="has not finished its work"):
        handlers.CudaHealthCheck(timedelta(0))(None)
    never.set()


def test_health_without_a_gpu() -> None:
    assert handlers.CudaHealthCheck()("state", None) == ("state", None)


def test_a_disabled_wrapper_leaves_the_function() -> None:
    def function() -> None: ...

    assert HPWrapper(enabled=False)(function) is function


def by_name(x: int, caller: Optional[HPCallWrapper] = None) -> Any:  # noqa: UP045  (as AWS writes it)
    return x, caller


def by_text(x: int, *, here: "HPCallWrapper") -> Any:  # noqa: UP037
    return x, here


@pytest.mark.parametrize("function", [by_name, by_text])
def test_the_call_wrapper_is_passed_by_its_annotation(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_RUNTIME, '{"name": "a", "nodes": 1, "workers_per_node": 1, "mode": "run"}')
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("RANK", "1")
    x, caller = HPWrapper()(function)(5)
    assert (x, caller.seq, caller.state.rank) == (5, 2, 1)
    with pytest.raises(JobFailedError, match="in which the script saves its state itself"):
        caller.run  # noqa: B018
    with pytest.raises(JobFailedError, match="keeps state in memory") as refused:
        HPWrapper(checkpoint_manager=CheckpointManager())(function)(5)
    assert "mode: ours" in refused.value.hint
    with pytest.raises(JobFailedError, match="outside of a function with the decorator HPWrapper"):
        current_run("Strategy")


def test_a_call_wrapper_of_the_script_s_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_RUNTIME, '{"name": "a", "nodes": 1, "workers_per_node": 1, "mode": "run"}')
    assert HPWrapper()(by_name)(5, caller=None) == (5, None)


def test_log_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("HPWRAPPER_LOG_LEVEL", "warning")
    assert logs.debug_msg("hello", steps=4).startswith("[RANK:3][SEQ:0][STEPS:4]")
    text, usage = logs.memory_status(tag="before")
    assert "[before]" in text
    assert all(value >= 0 for value in usage.values())
    logger = logs.get_logger("compat-test")
    logger.info("left out")
    logger.warning("printed")
    assert capsys.readouterr().out.endswith("printed\n")
    assert logs.get_logger("compat-test").handlers == logger.handlers
    monkeypatch.setenv("HPWRAPPER_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="loud"):
        logs.get_logger()
