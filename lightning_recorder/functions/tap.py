"""Taps for the outputs of torch functions, and for the gradients of these outputs."""

from __future__ import annotations

import copy
import sys
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from threading import get_ident
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_recorder.errors import RecordingError, describe_error, warn
from lightning_recorder.functions.attention import scores_of_call
from lightning_recorder.functions.losses import (
    classes_of_loss,
    padding_of,
    share_of_ends,
    share_of_next,
    sides_of_loss,
    some_of,
)
from lightning_recorder.functions.routers import RouterReader
from lightning_recorder.functions.table import FUNCTIONS, SCORE_KINDS, SCORED, SCORES, TYPES, site_name
from lightning_recorder.graph.capture.function_calls import find_caller, function_name
from lightning_recorder.graph.capture.modules import FUSED
from lightning_recorder.internals.autograd import (
    CALL_OF_FUNCTION,
    CALL_OF_MODULE,
    graph_task,
    in_backward,
    is_tracing,
    remove_function_mode,
)
from lightning_recorder.internals.compiled import (
    compiled_owner,
    describe_compiled,
    flex_attention_users,
    observe_compiled_calls,
)
from lightning_recorder.internals.module_tree import (
    ModuleMap,
    children_of,
    class_name,
    is_a,
    is_training,
    modules_of,
    parameters_of,
    stored_attribute,
)
from lightning_recorder.internals.pause_recording import PAUSES
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.module_names import is_metric, named_submodules
from lightning_recorder.names import compile_glob
from lightning_recorder.taps import OutputGradientTap, OutputTap, Receiver, Site, Tap

__all__ = ["KNOWN", "ChosenFunctions", "FunctionGradientTap", "FunctionOutputTap"]


def _known() -> dict[Callable[..., Any], str]:
    """Return the names of the recordable torch functions and tensor methods, including in-place variants."""
    found = {}
    for name in (*FUNCTIONS, "expit", "logsigmoid", "_threshold"):
        for spelled in (name, f"{name}_"):
            for place in (torch.nn.functional, torch, Tensor, torch.special):
                function = getattr(place, spelled, None)
                if callable(function) and function_name(function) in FUNCTIONS:
                    found[function] = function_name(function)
    return found


KNOWN: Mapping[Callable[..., Any], str] = MappingProxyType(_known())
"""The name of each function and method in :data:`FUNCTIONS`."""


class ChosenFunctions:
    """The functions to record, and the modules that call them.

    Args:
        root: The model.
        functions: The names of functions, ``"heads"`` and ``"experts"``.
        names: Names or globs of sites, such as ``encoder.relu``; None for all.
        types: The classes of the equivalent modules, such as ``ReLU``; None for all.
        exclude: Names or globs of sites to exclude, or None.
    """

    def __init__(
        self,
        root: nn.Module,
        functions: Collection[str],
        *,
        names: Sequence[str] | None = None,
        types: Sequence[str | type[nn.Module]] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> None:
        self.functions = frozenset(functions)
        self.root = root
        self._names = None if names is None else [compile_glob(name).fullmatch for name in names]
        wanted = [kind if isinstance(kind, str) else kind.__name__ for kind in types or ()]
        self._types = None if types is None else {kind.rpartition(".")[2] for kind in wanted}
        self._excluded = [compile_glob(name).fullmatch for name in exclude or ()]
        modules = named_submodules(root, with_lent=True)
        self._taken = modules.keys()
        self._modules: ModuleMap[str] = ModuleMap()
        closed = tuple(f"{name}." for name, each in modules.items() if is_metric(each))
        for name, each in modules.items():
            if not is_metric(each) and not name.startswith(closed):
                self._modules[each] = name
        self._fused = [each for each in modules.values() if is_a(each, FUSED)]
        self.flex = flex_attention_users(root)[-1:] if "heads" in self.functions else []
        """The last module with ``flex_attention``, whose scores cannot be observed; empty if there is none."""
        self._sites: dict[tuple[int, str, int, bool], str] = {}

    def having(self, functions: Iterable[str]) -> ChosenFunctions:
        """Return a copy with additional functions."""
        more = copy.copy(self)
        more.functions, more._sites = self.functions.union(functions), {}
        return more

    @property
    def is_fused_path_open(self) -> bool:
        """True if a function mode would change the computation of a module, by closing a fused path."""
        return not all(map(is_training, self._fused))

    @cached_property
    def end_token(self) -> int | None:
        """The id of the end-of-sequence token, from the configuration of a transformers model; None if unknown."""
        for each in modules_of(self.root):
            config = stored_attribute(each, "config")  # without the code of a property, which may draw numbers
            end = stored_attribute(config, "eos_token_id")
            if type(end) is int and not stored_attribute(config, "is_encoder_decoder", False):
                return end
        return None

    @property
    def has_batches(self) -> bool:
        """True if the tensors of batches are recorded: if losses are recorded and no sites or types are named."""
        return self._names is None and self._types is None and "cross_entropy" in self.functions

    def has_batch(self, path: str) -> bool:
        """Return True if a tensor of the batch is not excluded by its name, such as ``batch[0]``."""
        return not any(fits(path) for fits in self._excluded)

    def name(self, module: nn.Module | None, function: str, number: int, *, is_loss: bool = False) -> str:
        """Return the name of the site of a function, or an empty string if the function must not be recorded.

        Args:
            module: The innermost module; None for the model itself.
            function: The name of the function.
            number: The number of the function call within the module call, starting at 1.
            is_loss: Return the site for the prediction and target of a loss. If the module only computes this loss, as
                ``nn.CrossEntropyLoss`` does, this is the site of the module.
        """
        key = 0 if module is None else id(module), function, number, is_loss
        found = self._sites.get(key)
        if found is None:
            within = self.root if module is None else module
            found = self._sites[key] = self._new_name(within, function, number, is_loss)
        return found

    def name_of_scores(self, module: nn.Module | None, function: str, number: int) -> str:
        """Return the name of the site of the scores of a function, or an empty string if they must not be recorded.

        Scores are recorded even if the output of the function is not. By default, outputs of attention and routers are
        not recorded.
        """
        within = self.root if module is None else module
        around = self._modules.get(within)
        if around is None or not self.has_scores:
            return ""
        if _is_whole(within, function):
            return self._if_chosen(function, around, around)
        bare, name = (site_name(around, function, each, self._taken) for each in (1, number))
        return self._if_chosen(function, bare, name)

    def is_made_by_caller(self, module: nn.Module) -> bool:
        """Return True for a torch module that computes a function and is not part of the model."""
        kind = type(module)
        return class_name(kind) in TYPES and _is_of_torch(kind) and module not in self._modules

    @property
    def has_scores(self) -> bool:
        """True if the scores inside attention or routers are recorded."""
        return not self.functions.isdisjoint(SCORE_KINDS)

    def _new_name(self, module: nn.Module, function: str, number: int, is_loss: bool) -> str:
        around = self._modules.get(module)
        if around is None or function not in self.functions:
            return ""
        if _is_whole(module, function):
            return self._if_chosen(function, around, around) if is_loss else ""
        bare, name = (site_name(around, function, each, self._taken) for each in (1, number))
        return self._if_chosen(function, bare, name)

    def _if_chosen(self, function: str, bare: str, name: str) -> str:
        is_named = self._names is None or any(fits(each) for fits in self._names for each in (bare, name))
        is_typed = self._types is None or FUNCTIONS[function].type_name in self._types
        is_excluded = any(fits(each) for fits in self._excluded for each in (bare, name))
        return name if is_named and is_typed and not is_excluded else ""


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


def _is_whole(module: nn.Module, function: str) -> bool:
    """Return True if the function computes the output of the module, as in ``nn.ReLU``."""
    if any(True for _ in children_of(module)):
        return False
    if _is_of_torch(type(module)):
        return True
    kind = FUNCTIONS[function].kind
    return kind == "activations" and "softmax" not in function and not any(True for _ in parameters_of(module))


class _Call(NamedTuple):
    """The innermost call of a module that is in progress.

    Args:
        module: The module; None for the model itself, all of whose calls count as one call.
        frame: An identifier that distinguishes simultaneous calls.
        is_new: True for the first function of this call.
    """

    module: nn.Module | None
    frame: int
    is_new: bool


def _innermost_call(chosen: ChosenFunctions) -> _Call | None:
    """Return the call that a function belongs to, or None if the function is not part of the model.

    A torch module that is created where it is called, such as ``nn.Softmax(dim=-1)(scores)``, counts as a function of
    the calling module.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is CALL_OF_MODULE:
            module = frame.f_locals["self"]
            if module is chosen.root:
                break
            if chosen.is_made_by_caller(module):
                frame = frame.f_back
                continue
            # Neither the address of the frame, which the next call may reuse, nor a reference to it, which would keep
            # its tensors alive, can identify the call. So mark the frame, which runs torch's own code, by an attribute
            # that only debuggers read.
            is_new, frame.f_trace_lines = frame.f_trace_lines, False
            return _Call(module, id(frame), is_new)
        if code is CALL_OF_FUNCTION and frame.f_locals["cls"].__module__ != "torch.utils.checkpoint":
            return None  # in the graph, a custom autograd function is a single node
        frame = frame.f_back
    if graph_task() != -1:
        return None  # a checkpoint repeats a function outside of modules, so the caller is unknown
    caller = find_caller(outermost=True)
    return None if caller.trainer or caller.custom is not None else _Call(None, 0, False)


class _FunctionMode(TorchFunctionMode):
    """Passes the results of known functions to the taps of a thread, with the calling module and the call number.

    Results are read after the function has returned. The mode is not active inside a function. All taps of a thread
    share one mode, since each mode adds overhead to every torch function.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = get_ident()
        self._taps: list[_FunctionTap] = []
        self._is_entered = False
        self._holds = 0  # the number of running calls of compiled code, during which the mode is removed
        self._counts: dict[int, dict[str, int]] = {}  # by module call: the number of calls of each function

    def add(self, tap: _FunctionTap) -> None:
        """Start to pass results to a tap."""
        if not self._taps:
            self._counts.clear()
        if tap not in self._taps:
            self._taps.append(tap)
        self.update()

    def discard(self, tap: _FunctionTap) -> None:
        """Stop passing results to a tap."""
        if tap in self._taps:
            self._taps.remove(tap)
            self.update()

    def hold(self) -> None:
        """Remove the mode until :meth:`release`."""
        self._holds += 1
        self.update()

    def release(self) -> None:
        """Undo one :meth:`hold`."""
        self._holds -= 1
        self.update()

    def update(self) -> None:
        """Enter or leave the mode as needed. Only the thread of the mode can do this; other threads do nothing."""
        is_wanted = not self._holds and not all(map(_RESTS, self._taps))
        if is_wanted is not self._is_entered and self._thread == get_ident():
            self._is_entered = is_wanted
            if is_wanted:
                self.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
            else:
                remove_function_mode(self)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            name = KNOWN.get(func)
        except TypeError:  # the function is not hashable
            return result
        if name is not None and self._taps and not PAUSES.value and not is_tracing():
            try:
                self._note(name, args, kwargs or {}, result)
            except RecordingError:  # raised by a strict tap
                raise
            except Exception as error:  # noqa: BLE001 - an error of the recording must not fail the model
                self._fail(error)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if FUNCTIONS[name].kind == "dropout" and args and _is_same(result, args[0]):
            return  # a no-op, which the graph does not contain
        call = _innermost_call(self._taps[0].chosen)
        if call is None:
            return
        counts = self._counts.get(call.frame)
        if counts is None or call.is_new:
            counts = self._counts[call.frame] = {}
        number = counts[name] = counts.get(name, 0) + 1
        if _is_of_data(name, result):
            return
        for tap in tuple(self._taps):
            tap.observe(name, tap.chosen.name(call.module, name, number), result)
        if FUNCTIONS[name].kind == "losses":
            for tap in tuple(self._taps):
                tap.observe_loss(name, tap.chosen.name(call.module, name, number, is_loss=True), args, kwargs)
        elif name in SCORED:
            for tap in tuple(self._taps):
                tap.observe_scores(name, number, call, args, kwargs, result)

    def _fail(self, error: Exception) -> None:
        is_strict = any(tap.strict for tap in self._taps)
        message = f"torch functions could not be recorded: {describe_error(error)}"
        for tap in tuple(self._taps):
            self.discard(tap)
        if is_strict:
            raise RecordingError(message) from error
        warn(f"{message}. They are no longer recorded in this step; strict=True raises instead.")


def _is_same(result: Any, given: Any) -> bool:
    """Return True if a result is the given tensor itself, or a view of the whole tensor."""
    are_plain = type(result) is Tensor and type(given) is Tensor
    return result is given or (are_plain and result.data_ptr() == given.data_ptr())


def _is_of_data(name: str, result: Any) -> bool:
    """Return True for a result of ``clamp`` without a gradient, which often prepares masks and indices."""
    return (
        FUNCTIONS[name].type_name == "Clamp"
        and isinstance(result, Tensor)
        and (not result.is_floating_point() or (torch.is_grad_enabled() and not result.requires_grad))
    )


_RESTS = attrgetter("rests")


class _Modes(threading.local):
    mode: _FunctionMode | None = None


_MODES = _Modes()


class _FunctionTap(Tap):
    """A tap without modules that receives the results of functions while it is attached.

    Args:
        chosen: The functions to record.
        receive: The receiver, as for :class:`~lightning_recorder.taps.Tap`. The name of a site consists of the names of
            the calling module and of the function, such as ``encoder.relu``. The second call of the function within a
            module call is ``encoder.relu#2``. If a module has this name, the site is ``encoder.relu()``.
        options: The other arguments of :class:`~lightning_recorder.taps.Tap`.
    """

    def __init__(self, chosen: ChosenFunctions, receive: Receiver, **options: Any) -> None:
        super().__init__({}, receive, **options)
        self.chosen = chosen
        """The functions to record."""
        self.unseen = ""
        """The part of the model whose functions were not recorded, with the reason; empty if all were recorded."""
        self.rests = False
        """True if no more model functions are expected until the tap is attached again."""
        self._mode: _FunctionMode | None = None

    @override
    def attach(self) -> None:
        """Attach the tap. A no-op if the tap is already attached.

        A function mode disables the fused path of a transformer in eval mode, which changes the last bits of its
        results. Therefore, no functions are recorded while a fused path is in use.
        """
        if self._attached:
            return
        self._attached = True
        if not self._hooked:
            self._hooked = True
            if self.eager:
                self._stance.hold()
            else:
                self._thread = get_ident()
                observe_compiled_calls(self._enter_compiled, first=True)
        if self.chosen.flex:
            self.unseen = self.unseen or f"flex_attention, as in {self.chosen.flex[0]}"
        if self.chosen.is_fused_path_open:
            self.unseen = "any module, because a transformer in eval mode takes its fused path"
        else:
            _MODES.mode = self._mode = _MODES.mode or _FunctionMode()
            self._mode.add(self)

    @override
    def pause(self) -> None:
        super().pause()
        self._leave()

    @override
    def remove(self) -> None:
        super().remove()
        self._leave()

    def rest(self) -> None:
        """Leave the mode until the tap is attached again, because a mode adds overhead to every torch function."""
        if self._mode is not None and not self.rests:
            self.rests = True
            self._mode.update()

    def _leave(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.discard(self)
        self.rests = False

    @override
    def _enter_compiled(self, function: Callable[..., Any], /) -> Callable[[Any, Any, Any], object] | None:
        """Remove the mode during a call of compiled code, because the mode would cause a recompilation."""
        mode = self._mode
        if mode is None or self._thread != get_ident():
            return None
        if compiled_owner(function) not in self.traced:
            self.compiled_calls.add(describe_compiled(function))
        self.unseen = self.unseen or "compiled code, which stays compiled"
        mode.hold()
        return lambda args, kwargs, result: mode.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_mode": None}

    @abstractmethod
    def observe(self, function: str, name: str, result: Any) -> None:
        """Receive the result of a function. ``name`` is the name of the site, empty if the function is not chosen."""

    def observe_loss(self, function: str, name: str, args: Any, kwargs: Any) -> None:
        """Receive the arguments of a loss. ``name`` is as for :meth:`observe`, or the name of the loss module."""

    def observe_scores(self, function: str, number: int, call: _Call, args: Any, kwargs: Any, result: Any) -> None:
        """Receive a call of a function that may be part of attention or of a router."""


_MOST_TOKENS = 4  # maximum number of token inputs per step: encoder and decoder, each with positions


class FunctionOutputTap(_FunctionTap, OutputTap):
    """Records the results of functions when they return; arguments as for ``_FunctionTap``.

    The prediction and the target of a loss are recorded as ``in.prediction`` and ``in.target``, with their class
    counts; see :mod:`~lightning_recorder.functions.losses`. The scores inside attention and routers are recorded as
    ``in.scores`` if there is a receiver for them.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.ones(()))
        ...     def forward(self, x):
        ...         return torch.relu(torch.relu(self.scale * x) - 1)
        >>> net = nn.Sequential(Net())
        >>> chosen = ChosenFunctions(net, ["relu"])
        >>> with FunctionOutputTap(chosen, lambda site, tensor: print(*site, tensor.tolist())):
        ...     _ = net(torch.tensor([-1.0, 3.0]))
        0.relu out [0.0, 3.0]
        0.relu#2 out [0.0, 2.0]
    """

    @override
    def observe(self, function: str, name: str, result: Any) -> None:
        if name and not in_backward():
            self.called.add(name)
            self._guarded(name, Site(name, "out"), self._record, None, (), result)

    @override
    def observe_loss(self, function: str, name: str, args: Any, kwargs: Any) -> None:
        if name and not in_backward():
            self._guarded(name, None, self._record_loss, function, args, kwargs)

    def _record_loss(self, name: str, function: str, args: Any, kwargs: Any) -> None:
        sides = sides_of_loss(function, args, kwargs)
        some = {path: some_of(tensor) for path, tensor in sides.items()}
        found = [*some.items(), *classes_of_loss(function, some, args, kwargs).items()]
        target = sides.get("in.target")
        if function == "cross_entropy" and target is not None and not target.is_floating_point():
            found += [("in.target.next", each) for each in self._shares_of_next(target, 1)]
            found += [("in.target.after_next", each) for each in self._shares_of_next(target, 2)]
            found += [("in.target.ends", each) for each in self._shares_of_ends(target)]
        self._pass_on(name, found)

    def _shares_of_next(self, target: Tensor, ahead: int) -> list[Tensor]:
        """Return the largest fraction of targets that equal a later token of a token input; empty without inputs."""
        same = [each for each in self._tokens if each.device == target.device]
        shares = [each for each in (share_of_next(target, tokens, ahead=ahead) for tokens in same) if each is not None]
        return [torch.stack(shares).amax()] if shares else []

    def _shares_of_ends(self, target: Tensor) -> list[Tensor]:
        """Return the fraction of end tokens in the latest token input that are targets; empty if unknown."""
        same = [each for each in self._tokens if each.device == target.device]
        end = self.chosen.end_token
        shares = [share_of_ends(target, each, end) for each in same] if end is not None else []
        return [each for each in shares if each is not None][-1:]

    receive_scores: Callable[[Site, Tensor | None, Tensor], None] | None = None
    """A receiver of the scores of each query or token, and of the statistics of each head or expert; or None.

    The scores are None if a router chooses additional experts for the same tokens.
    """

    time_of: Callable[[str], Stopwatch] = staticmethod(lambda option: Stopwatch())
    """A function that returns the stopwatch of ``"attention"`` or ``"experts"``. By default, times are discarded."""

    @cached_property
    def _routers(self) -> RouterReader:
        return RouterReader()

    @cached_property
    def _tokens(self) -> deque[Tensor]:
        return deque(maxlen=_MOST_TOKENS)

    @cached_property
    def _paddings(self) -> deque[Tensor]:
        return deque(maxlen=_MOST_TOKENS)

    @override
    def _leave(self) -> None:
        super()._leave()
        self._routers.clear()
        self._tokens.clear()
        self._paddings.clear()

    @override
    def observe_scores(self, function: str, number: int, call: _Call, args: Any, kwargs: Any, result: Any) -> None:
        if self.receive_scores is not None and not in_backward():
            name = self.chosen.name_of_scores(call.module, function, number)
            if name:
                self._guarded(name, None, self._record_scores, function, call, args, kwargs, result)

    def _record_scores(self, name: str, function: str, call: _Call, args: Any, kwargs: Any, result: Any) -> None:
        if self.receive_scores is None or (self._condition is not None and not self._condition()):
            return
        if function == "embedding":
            tokens = args[0] if args else kwargs["input"]
            if type(tokens) is Tensor and tokens.dim() == 2 and tokens.shape[1] > 1:
                self._tokens.append(tokens)
                padding = args[2] if len(args) > 2 else kwargs.get("padding_idx")
                if type(padding) is int and padding >= 0:
                    self._paddings.append(padding_of(tokens, padding))
            return
        if "heads" in self.chosen.functions:
            watch = self.time_of("attention")
            started = watch.start()
            scores = scores_of_call(function, call.module or self.chosen.root, args, kwargs, self._paddings)
            if scores is not None:
                self.receive_scores(Site(name, SCORES), scores.largest, scores.block)
                watch.stop(started)
                return
        # A choice in the model itself is a prediction, not a choice of experts.
        if call.module is not None and "experts" in self.chosen.functions:
            watch = self.time_of("experts")
            started = watch.start()
            choice = self._routers.read(function, name, call.module, call.frame, args, kwargs, result)
            if choice is not None:
                self.receive_scores(Site(choice.name, SCORES), choice.best, choice.block)
                watch.stop(started)


class FunctionGradientTap(_FunctionTap, OutputGradientTap):
    """Records the gradients of the results of functions, except losses; arguments as for ``_FunctionTap``.

    The gradients of functions inside a reentrant checkpoint are not recorded, because the graph of such a checkpoint is
    built inside the backward pass, where no function mode is active.
    """

    @override
    def observe(self, function: str, name: str, result: Any) -> None:
        if name and FUNCTIONS[function].kind != "losses":
            self.called.add(name)
            self._guarded(name, None, self._record, None, (), result)
