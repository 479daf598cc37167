"""The drafter's dense parts as TensorRT engines (`drafter.backend=tensorrt`), by torch-tensorrt or its RTX variant.

`graphs.drafter` has two of them, all that a layer does before and after its attention. Each is an operator here: on
a CPU the function itself, on CUDA one engine, which a compiled round calls as it calls any kernel and a CUDA graph
records. Weights are among its inputs, so an engine serves all layers, knows none of their values and takes no memory
for them; it is built from shapes alone. Its file lies among the kernels of the compiled round that first needed it.
The one file that knows these packages, and only what asks for engines imports them.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config import Config
from ..graphs import drafter
from ..graphs.pytree import tree_map
from ..graphs.state import Shape
from ..ops import KERNELS, REFERENCE, Ops
from .store import fingerprint, write

ALIGNED = 256  # bytes that TensorRT wants an address to be a multiple of


def project(
    x: Tensor, norm: Tensor, q: Tensor, kv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = drafter.project(REFERENCE, x, norm, q, kv, q_norm, k_norm, cos, sin, eps)
    return queries, keys, values.contiguous()


def finish(x: Tensor, o: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
    return drafter.finish(REFERENCE, None, x, o, out, norm, gate_up, down, eps)


PARTS: dict[str, Callable[..., Any]] = {"project": project, "finish": finish}
draft_project = torch.library.custom_op("kimi_fx::draft_project", project, mutates_args=())
draft_finish = torch.library.custom_op("kimi_fx::draft_finish", finish, mutates_args=())
draft_project.register_fake(project)
draft_finish.register_fake(finish)
draft_project.register_kernel("cuda")(lambda *given: tuple(engine_of("project", given)(*given[:-1])))
draft_finish.register_kernel("cuda")(lambda *given: engine_of("finish", given)(*given[:-1])[0])


def operators(backend: str) -> Ops:
    """What compiled rounds are made of."""
    return (
        replace(KERNELS, draft_project=draft_project, draft_finish=draft_finish) if backend == "tensorrt" else KERNELS
    )


def check_backend(config: Config, device: torch.device, compiled: bool) -> None:
    """Raises ValueError where engines are asked for and cannot be had, before anything is loaded."""
    if config.drafter.backend != "tensorrt":
        return
    why = None
    if device.type != "cuda":
        why = f"needs a CUDA device and this runs on {device}"
    elif config.mesh.tp > 1:
        why = f"serves one rank and mesh.tp is {config.mesh.tp}"
    elif not compiled:
        why = "is part of compiled rounds and none are in use"
    if why:
        raise ValueError(f"drafter.backend=tensorrt {why}: leave it out, or change that.")


def packages() -> tuple[Any, Any]:
    """torch_tensorrt and the TensorRT that it found. Raises ValueError where there is none."""
    try:
        for logger in ("torch_tensorrt", "torch_tensorrt [TensorRT Conversion Context]"):
            logging.getLogger(logger).setLevel(logging.ERROR)  # it tells of other packages and of default streams
        # The bindings of its plug-in folder are missing in some releases: as if it were not there.
        sys.modules.setdefault("tensorrt.plugin", None)  # type: ignore[arg-type]
        with warnings.catch_warnings(action="ignore"):  # it would also redirect all later ones
            import torch_tensorrt
            import torch_tensorrt.dynamo
    except Exception as error:  # of a bare kind without its libraries
        why = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(
            f"drafter.backend=tensorrt, but torch_tensorrt cannot be imported ({why}): "
            "pip install 'kimi-fx[tensorrt]', or leave it out."
        ) from error
    return torch_tensorrt, sys.modules["tensorrt"]


def versions() -> str:
    """Of both, as one ingredient of the artefact store."""
    torch_tensorrt, tensorrt = packages()
    return f"tensorrt {tensorrt.__version__}, torch-tensorrt {torch_tensorrt.__version__}"


@dataclass(frozen=True)
class Engine:
    """One part, ready to run on tensors of the shapes it was built for."""

    context: Any
    names: tuple[str, ...]  # of inputs, then outputs
    shapes: tuple[tuple[int, ...], ...]  # of the outputs
    kept: tuple[Any, ...]  # what the context lives on

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The outputs, computed on the current stream."""
        given = [t if t.is_contiguous() and t.data_ptr() % ALIGNED == 0 else copied(t) for t in tensors]
        outputs = [tensors[0].new_empty(shape) for shape in self.shapes]
        for name, tensor in zip(self.names, (*given, *outputs), strict=True):
            self.context.set_tensor_address(name, tensor.data_ptr())
        if not self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("a TensorRT engine of the drafter did not run: drafter.backend=inductor does without.")
        return outputs


ENGINES: dict[str, Engine] = {}  # by what they compute, as compiled code calls an operator and no object


def copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def engine_of(part: str, given: Sequence[Any]) -> Engine:
    engine = ENGINES.get(key(part, given))
    if engine is None:
        raise RuntimeError(f"no TensorRT engine for the drafter's {part} of these shapes was loaded.")
    return engine


def key(part: str, given: Sequence[Any]) -> str:
    """Name of the engine for these inputs: the shapes decide."""
    *tensors, eps = given
    forms = {str(i): f"{tuple(t.shape)} {t.dtype} {t.device}" for i, t in enumerate(tensors)}
    return f"{part}-{fingerprint(forms | {'eps': str(eps)})}"


def load_engines(arguments: tuple[Any, ...], kernels: Path) -> None:
    """The engines that a round of these arguments calls, from the folder; built into it where it has none."""
    if arguments[-1].ops.draft_project is None or not isinstance(arguments[3], Shape) or arguments[3].nodes == 1:
        return
    for part, given in inputs(*arguments).items():
        name = key(part, given)
        file = kernels / "tensorrt" / f"{name}.engine"
        with torch.cuda.device(given[0].device):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write(file, build(part, given))
            if name not in ENGINES:
                ENGINES[name] = load(file, len(given) - 1)


def inputs(params: Any, pool: Any, state: Any, shape: Shape, model: Any) -> dict[str, tuple[Any, ...]]:
    """What a round gives to each part: tensors without memory, and the epsilon."""
    seen: dict[str, tuple[Any, ...]] = {}

    def listening(part: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            seen[part] = given
            return PARTS[part](*given)

        return call

    ops = replace(model.ops, draft_project=listening("project"), draft_finish=listening("finish"))
    with FakeTensorMode() as mode:
        drafts, target, pool, state = tree_map(mode.from_tensor, (params.drafter, params.target, pool, state))
        drafter.draft(drafts, target, model.drafter, ops, pool, state, shape.block)
    return seen


def build(part: str, given: Sequence[Any]) -> bytes:
    """One part as a serialised engine."""
    torch_tensorrt, _ = packages()
    *tensors, eps = given
    forms = [torch_tensorrt.Input(shape=tuple(t.shape), dtype=t.dtype, torch_tensor=t) for t in tensors]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            engine: bytes = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine(
                exported(part, tensors, eps), arg_inputs=forms, timing_cache_path=f"{scratch}/timing"
            )
    except Exception as error:  # its own log says why
        raise RuntimeError(
            f"TensorRT built no engine for the drafter's {part} ({error}): drafter.backend=inductor does without."
        ) from error
    return engine


def exported(part: str, tensors: Sequence[Tensor], eps: float) -> torch.export.ExportedProgram:
    """One part as a graph of PyTorch's operators, norms written out, as TensorRT would square in bf16."""

    class Part(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return PARTS[part](*given, eps)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own calls to itself
        program = torch.export.export(Part(), tuple(tensors))
        return program.run_decompositions({torch.ops.aten.rms_norm.default: rms_norm})


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in fp32 up to the result's rounding."""
    y = x.float()
    return (y * ((y * y).mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def load(file: Path, count: int) -> Engine:
    """An engine that takes `count` inputs, and its kernels from beside it, or kept there."""
    torch_tensorrt, tensorrt = packages()
    runtime = tensorrt.Runtime(torch_tensorrt.logging.TRT_LOGGER)
    engine = runtime.deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        raise RuntimeError(f"TensorRT cannot load {file}: delete it to have it built again.")
    settings, compiled = engine.create_runtime_config(), file.with_suffix(".jit")
    if jit := hasattr(settings, "create_runtime_cache"):  # the variant for RTX compiles kernels here
        cache = settings.create_runtime_cache()
        if compiled.exists():
            cache.deserialize(compiled.read_bytes())
        settings.set_runtime_cache(cache)
    context = engine.create_execution_context(settings)
    if jit and not compiled.exists():
        write(compiled, bytes(cache.serialize()))
    names = tuple(engine.get_tensor_name(i) for i in range(engine.num_io_tensors))
    shapes = tuple(tuple(engine.get_tensor_shape(name)) for name in names[count:])
    return Engine(context, names, shapes, (runtime, engine, settings))
