"""What the system below a run reports: its driver, GPU, shared libraries, compilers, installers and platform.

Most of these messages have one meaning, whatever the run does: the files in `rules/` have them with their rules. Others
name something from which the cause follows: a library, an architecture, releases on offer, a wheel's tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from reshard.base.suggest import closest
from reshard.diagnosis.builds import package_of_extension, supplied, way_to_rebuild
from reshard.diagnosis.failures import CUT_OFF, EXIT
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.history.table import table
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at
from reshard.diagnosis.upstream import place_in_code
from reshard.diagnosis.wheels import of_build, of_offered, of_platform, of_wheel
from reshard.diagnosis.words import words


def of_system(root: Traceback, log: Log) -> Finding | None:
    """The finding for what the system reports in a failure, or just before one that is its effect."""
    for ask in _ASKED:
        for said, number in _texts(root, log):
            if found := ask(said, log):
                where = place_in_code(root.root) if root.root.frames else ""
                return told_at((found[0], {"where": where, **found[1]}), log.name, number, said)
    return None


_HIDDEN = re.compile(
    r"cannot open shared object file|undefined symbol: \w|can't load C\+\+/CUDA extensions"
    r"|is not a recognized processor|is not defined for option 'gpu-name'"
    r"|[Cc]ould not load library|mpirun has detected an attempt"
)
"""Reports of something that a package did not load, after which it continues."""
BEFORE = 400
"""Lines before a failure in which a package may report what it did not load."""


def _texts(root: Traceback, log: Log) -> Iterator[tuple[str, int]]:
    """The messages of the failure and of those before it in its chain; then reports of what was not loaded."""
    if _NO_GPU.search(root.said):
        yield from ((line.text, line.number) for line in log.lines if _NOT_STARTED.search(line.text))
    failure: Traceback | None = root
    while failure is not None:
        yield failure.said, failure.last
        failure = failure.before
    shown = "\n".join([*root.frames, root.said])
    if "device-side assert" in root.said:
        yield from ((line.text, line.number) for line in log.lines if "Assertion `" in line.text)
    if root.said.endswith("the following dependency conflicts."):
        below = [line for line in log.lines if 0 < line.number - root.last < LAST_WORDS]
        yield from ((line.text, line.number) for line in below)
    near = [line for line in log.lines if line.stream == root.stream and 0 < root.last - line.number < BEFORE]
    if "Error building extension" in root.said:
        yield from ((line.text, line.number) for line in near if "error" in line.text)
    if root.exception == EXIT or any(map(_LAUNCHES.search, root.frames[-1:])):
        yield from ((line.text, line.number) for line in near[-LAST_WORDS:][::-1])
    for at, line in enumerate(near):
        if _HIDDEN.search(line.text) and not _OTHERS.search(line.text):
            text = "\n".join(each.text for each in near[at : at + 3])
            if root.exception == CUT_OFF or _about(text, shown):
                yield text, line.number


_NO_GPU = re.compile(r"infer device type|No CUDA GPUs are available|no NVIDIA driver|no supported GPU")
_NOT_STARTED = re.compile(r"CUDA initialization: |Error 80\d: ")
"""A warning that says why torch sees no GPU."""
LAST_WORDS = 12
"""Lines before a process ended itself, or before its launcher's traceback, that may contain its reason."""
_LAUNCHES = re.compile(
    r"accelerate[/\\]commands[/\\]|torch[/\\]distributed[/\\](?:run|launch)|launcher[/\\]api\.py"
)
_OTHERS = re.compile(r"tensorflow|TF-TRT|libnvinfer|dso_loader|jax", re.IGNORECASE)
"""Packages that report missing libraries as a matter of course."""
_PACKAGE = re.compile(
    r"xformers|memory_efficient_attention|flash[_-]attn|bitsandbytes|vllm|torch(?:vision|audio)|sgl[_-]kernel|triton",
    re.IGNORECASE,
)


def _about(report: str, failure: str) -> bool:
    """Whether a report and a failure are about the same package."""
    return bool(_packages(report) & _packages(failure))


def _packages(text: str) -> set[str]:
    named = [each.lower().replace("-", "_") for each in _PACKAGE.findall(text)]
    if re.search(
        "is not a recognized processor|option 'gpu-name'|PTXAS|ptxas", text
    ):  # the compiler in triton
        named.append("triton")
    return {"xformers" if each == "memory_efficient_attention" else each for each in named}


def reported(log: Log) -> Traceback | None:
    """A report of something that was not loaded, as the failure of a log that has no other."""
    for line in log.lines:
        later = line.number > log.progress.get(line.stream, 0)
        if later and _HIDDEN.search(line.text) and not _OTHERS.search(line.text):
            return Traceback(line.stream, line.number, line.number, line.number, "", line.text.strip())
    return None


# ------------------------------------------------------------------------------------------ shared libraries

_LIBRARY = re.compile(
    r"(?<![\w/.+-])(?:[\w./+~-]{0,300}/)?(?P<name>lib[\w+-]{1,60}(?:\.\d{1,3}){0,2}\.so(?:\.\d{1,6}){0,4})['\"]?"
    r"(?::? cannot (?:open shared object file|found)|[^\n]{0,20} in your library path| is not found)"
)
_OF_TORCH = re.compile(r"lib(?:torch|c10|caffe2|shm)\w*\.so")
_OF_DRIVER = re.compile(r"lib(?:cuda|nvidia-ml|nvidia-ptxjitcompiler|nvcuvid)\.so(?:\.1)?")
_OF_CUDA = re.compile(
    r"lib(?:cu(?:dart|blas|dnn|fft|rand|solver|sparse|pti|file)|nccl|nv(?:rtc|JitLink|ToolsExt|shmem))\w*\.so"
)
_TORCH_LOADS = re.compile(r'torch/__init__\.py", line \d+, in (?:<module>|_load_global_deps|_preload)')
_OF_ROCM = re.compile(r"lib(?:amdhip64|hip\w*|roc\w+|MIOpen|rccl|hsa-runtime64|amd_comgr)\.so[\d.]*")
_OF_ASCEND = re.compile(r"lib(?:hccl|ascend\w*|acl\w*|ge_\w+|runtime|opapi|graph\w*|mmpa|msprofiler|atb)\.so")


def _library(said: str, log: Log) -> Told | None:
    """A library that the loader does not find: whose it is, and how it is installed."""
    match = _LIBRARY.search(said)
    if match is None:
        return None
    name = match["name"]
    if name.startswith("libbitsandbytes_"):
        return None  # its own: an entry of the catalogue
    stem = name.partition(".so")[0]
    shown: dict[str, object] = {"name": name, "stem": f"{stem}.so", "short": stem.removeprefix("lib")}
    if _OF_CUDA.match(name):
        return _of_cuda(shown, name, said, log)
    for pattern, rule in (
        (_OF_DRIVER, "library-of-driver"),
        (_OF_ROCM, "library-of-rocm"),
        (_OF_ASCEND, "library-of-ascend"),
    ):
        if pattern.fullmatch(name):
            return rule, shown
    if _OF_TORCH.fullmatch(name):
        package = _asking(said, log)
        return "library-of-torch", {**shown, "package": package, "way": way_to_rebuild(package)}
    if known := supplied("libraries", name):
        return "library-missing", {**shown, **known}
    return "library-not-found", shown


def _of_cuda(shown: dict[str, object], name: str, said: str, log: Log) -> Told:
    """A library of CUDA: torch's own, or that of another CUDA."""
    if _TORCH_LOADS.search(log.text):
        return "library-of-torch-itself", shown
    number = re.search(r"\.so\.(1[1-9])(?:\.\d+)*$", name)
    majors = {"cufft": {"11": "12"}, "cusolver": {"11": "11 / 12"}}.get(str(shown["short"]), {})
    cuda = majors.get(number[1], number[1]) if number else ""
    major = Text(f" of CUDA {cuda}", f"（CUDA {cuda}）") if cuda else Text.same("")
    return "library-of-cuda", {**shown, "package": _asking(said, log), "major": major}


_FRAME = re.compile(r"(?:site|dist)-packages/(?P<name>[A-Za-z]\w*)[/.]")


def _asking(said: str, log: Log) -> str:
    """The last package in a log's frames other than torch: the one whose import fails."""
    named = [hit["name"] for hit in _FRAME.finditer(f"{log.text}\n{said}") if hit["name"] != "torch"]
    return package_of_extension(f"site-packages/{named[-1]}/{named[-1]}.so") if named else "PACKAGE"


# ------------------------------------------------------------------------------------------ architectures of GPUs

_ARCHITECTURES: dict[int, tuple[str, str | None]] = {
    **dict.fromkeys((30, 32), ("5.0", "10.2")),
    **dict.fromkeys((35, 37), ("6.5", "11.8")),
    **dict.fromkeys((50, 52, 53), ("6.5", "12.9")),
    **dict.fromkeys((60, 61, 62), ("8.0", "12.9")),
    **dict.fromkeys((70, 72), ("9.0", "12.9")),
    75: ("10.0", None),
    80: ("11.0", None),
    86: ("11.1", None),
    87: ("11.4", None),
    **dict.fromkeys((89, 90), ("11.8", None)),
    **dict.fromkeys((100, 101, 120), ("12.8", None)),
    **dict.fromkeys((103, 121), ("12.9", None)),
    110: ("13.0", None),
}
"""The first and last CUDA whose compiler knows an architecture, from the release notes of the toolkit."""
_TRITON = {90: "2.1", 100: "3.3", 120: "3.3", 103: "3.4", 121: "3.4"}
"""The first release of triton for an architecture."""
_UNKNOWN_ARCHITECTURE = re.compile(
    r"(?P<nvcc>[Uu]nsupported gpu architecture '(?:compute|sm)_(?P<a>\d{2,3}))"
    r"|'?(?:sm|compute)_(?P<b>\d{2,3})[af]?'? (?:is not defined for option|is not a recognized processor)"
    r"|does not support target '(?:sm|compute)_(?P<c>\d{2,3})"
    r"|(?P<torch>Unknown CUDA arch \((?P<d>\d{1,2}\.\d)[^)]{0,8}\) or GPU not supported)"
    r"|(?P<triton>getMMAVersionSafe)"
)
_COMPILES = {"nvcc": "architecture-nvcc", "torch": "architecture-torch", "triton": "architecture-triton-way"}
"""What helps with each tool, by the names of phrases."""
_NAMED_GPU = ((r"RTX (?:PRO )?50\d\d|RTX PRO \d000", 120), (r"\bG?B[23]00\b", 100), (r"\bGB10\b", 121))


def _architecture(said: str, log: Log) -> Told | None:
    """A GPU's architecture that a compiler does not know yet, or no longer."""
    match = _UNKNOWN_ARCHITECTURE.search(said)
    if match is None:
        return None
    number = match["a"] or match["b"] or match["c"] or (match["d"] or "").replace(".", "")
    if not number:
        number = str(next((arch for gpu, arch in _NAMED_GPU if re.search(gpu, log.text)), ""))
    known = _ARCHITECTURES.get(int(number)) if number else None
    if known is None:
        return None
    least, last = known
    tool = "nvcc" if match["nvcc"] else "torch" if match["torch"] else "triton"
    shown: dict[str, object] = {"tool": tool, "arch": f"sm_{number}", "least": least}
    if match["nvcc"] and last:
        return "architecture-dropped", {**shown, "last": last}
    triton = _TRITON.get(int(number))
    shown["triton"] = words("architecture-triton", triton=triton) if triton else Text.same("")
    dotted = f"{number[:-1]}.{number[-1]}"
    return "architecture-unknown", {**shown, "way": words(_COMPILES[tool], least=least, dotted=dotted)}


_NO_IMAGE = re.compile(r"no kernel image is available|invalid device function")
_KERNELS = re.compile(
    r"(?:site|dist)-packages/(?P<name>flashinfer|sgl_kernel|flash_attn|xformers|bitsandbytes|apex|auto_gptq|awq\w*"
    r"|exllama\w*|transformer_engine|mamba_ssm|causal_conv1d|deep_gemm|deep_ep|vllm)/"
)


def _image(root: Traceback, log: Log) -> Told | None:
    """A package without kernels for this GPU, as opposed to torch, by the innermost frame."""
    first = root.root
    frame = first.frames[-1].replace("\\", "/") if first.frames else ""
    match = _KERNELS.search(frame)
    if match is None or not _NO_IMAGE.search(first.said) or "HIP" in first.said:
        return None
    package = package_of_extension(f"site-packages/{match['name']}/a.so")
    engine = next((each for each in ("sglang", "vllm") if f"/{each}/" in "".join(first.frames)), "other")
    return "kernel-image-of-package", {"package": package, "way": words(f"kernels-{engine}", package=package)}


# ------------------------------------------------------------------------------------------ drivers

_DRIVER = re.compile(
    r"driver on your system is too old \(found version (?P<found>\d{4,5})\)"
    r"|driver version is insufficient for CUDA runtime|PTX was compiled with an unsupported toolchain"
    r"|device kernel image is invalid"
    r"|undefined symbol: cu[A-Z]\w+|CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
)
_INDEXES = ((13, 0, "cu130"), (12, 8, "cu128"), (12, 6, "cu126"), (12, 0, "cu121"), (11, 0, "cu118"))
"""Indexes of torch's wheels, by the least CUDA of a driver that runs them."""


def _driver(said: str, log: Log) -> Told | None:
    """A driver that is too old for the CUDA of what runs, and the wheels that it can run."""
    match = _DRIVER.search(said)
    if match is None:
        return None
    found = int(match["found"] or 0)
    major, minor = found // 1000, found % 1000 // 10
    index = next(
        (name for *least, name in _INDEXES if [major, minor] >= least), "cu118" if found else "cu121"
    )
    has = words("driver-has", cuda=f"{major}.{minor}") if found else Text.same("")
    return "driver-too-old", {"has": has, "index": index}


# ------------------------------------------------------------------------------------------ extensions that say it

_BUILT_FOR = re.compile(
    r"was built for:?\s+PyTorch (?P<built>\d[\w.+]{0,30}) with CUDA \d+ \(you have (?P<has>\d[\w.+]{0,30})\)"
)


def _built_for(said: str, log: Log) -> Told | None:
    match = _BUILT_FOR.search(said)
    if match is None or match["built"] == match["has"]:
        return None
    index = match["has"].partition("+")[2] or "cu126"
    return "extension-built-for", {**match.groupdict(), "package": "xformers", "index": index}


_NO_OPERATOR = re.compile(r"No operator found for `?memory_efficient_attention")
_REASONS = (
    (re.compile(r"device=cpu"), "cpu"),
    (re.compile(r"wasn.t buil[dt] with CUDA support|Operator wasn.t built"), "built"),
    (re.compile(r"dtype=torch\.float32"), "dtype"),
    (re.compile(r"bf16 is only supported on A100\+ GPUs"), "bf16"),
    (re.compile(r"requires device with capability"), "gpu"),
)
"""What xformers says about a kernel that cannot run; the first that occurs counts."""


def _operator(said: str, log: Log) -> Told | None:
    """Inputs for which xformers has no kernel."""
    match = _NO_OPERATOR.search(said)
    kind = next((kind for pattern, kind in _REASONS if pattern.search(log.text)), "") if match else ""
    shown = {"why": words(f"operator-{kind}"), "way": words(f"operator-{kind}-way")} if kind else None
    return ("operator-of-xformers", {**shown}) if shown else None


_NOT_USED = re.compile(r"PyTorch >= (?P<least>\d[\d.]*\d) is required but found (?P<has>\d[\w.+]*)")
_OF_TORCH_MISSING = re.compile(
    r"(?i:pytorch)|'(?:torch|nn|init_empty_weights|DTensor|Tensor)'|requires the PyTorch|dummy_pt_objects"
)


def _not_used(said: str, log: Log) -> Told | None:
    """A torch that transformers found too old, and went on without."""
    match = _NOT_USED.search(log.text) if _OF_TORCH_MISSING.search(said) else None
    return ("torch-not-used", match.groupdict()) if match else None


# ------------------------------------------------------------------------------------------ classes of tokenizers

_TOKENIZER = re.compile(r"Tokenizer class (?P<name>\w+) does not exist or is not currently imported")


def _tokenizer(said: str, log: Log) -> Told | None:
    """A tokenizer's class in its config that the installed transformers does not have."""
    match, own = _TOKENIZER.search(said), table("transformers")
    if match is None or own is None:
        return None
    name = match["name"]
    every = {each for group in own.raw["names"]["transformers"].values() for each in group.split(" ")}
    presence = own.name("transformers", name)
    same = next((each for each in sorted(every) if each != name and each.lower() == name.lower()), "")
    if presence.there and min(presence.there) > 0:
        since = own.versions[min(presence.there)]
        why, way = words("tokenizer-since", since=since), words("tokenizer-since-way", since=since)
    elif presence.there:
        why, way = words("tokenizer-needs"), words("tokenizer-needs-way", name=name)
    elif same or (near := closest(name, every, cutoff=0.9)):
        other = same or near[0]
        why, way = (
            words("tokenizer-renamed", other=other),
            words("tokenizer-renamed-way", name=name, other=other),
        )
    else:
        why, way = words("tokenizer-own"), words("tokenizer-own-way")
    return "tokenizer-class-unknown", {"name": name, "why": why, "way": way}


def of_kernels(root: Traceback, log: Log) -> Finding | None:
    """The finding for a package without kernels for this GPU."""
    found = _image(root, log)
    return told_at(found, log.name, root.last, root.said) if found else None


_ASKED: tuple[Callable[[str, Log], Told | None], ...] = (
    *(
        _built_for,
        _not_used,
        _operator,
        _library,
        _architecture,
        _driver,
        of_offered,
        of_wheel,
        of_platform,
        _tokenizer,
        of_build,
    ),
)
