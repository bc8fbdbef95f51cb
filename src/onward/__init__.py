"""Onward: decoder-only Transformer language models from understanding to use.

>>> lm = onward.load("runs/mybook")
>>> lm.generate("Once upon", max_new_tokens=50, temperature=0.8, seed=1)

Names are imported when they are first used, so that `import onward` is fast.
"""

from onward.base import handed

TYPE_CHECKING = False  # importing `typing` takes longer than everything else here
if TYPE_CHECKING:  # the module of each public name, which `lazily` reads from here
    from onward.api.folders import load
    from onward.api.language_model import LanguageModel
    from onward.api.runs import finetune, train
    from onward.api.saving import merge, save, save_adapter
    from onward.base.errors import UserError
    from onward.config.added_positions import Learned, Sinusoidal
    from onward.config.attention_options import (
        Indexer,
        Indexing,
        LogScale,
        OutputGate,
        PowerScale,
        QueryScale,
        SharedIndexer,
        SigmoidGate,
        SoftplusGate,
    )
    from onward.config.attention_parts import SelfAttention
    from onward.config.block_parts import (
        AttentionOnly,
        BranchNorm,
        FeedForwardOnly,
        LayerNorm,
        NoAttention,
        NoNorm,
        Parallel,
        PostNorm,
        PreNorm,
        RMSNorm,
        Sandwich,
        SharedNorm,
    )
    from onward.config.decoder import DecoderConfig
    from onward.config.differential_parts import DifferentialAttention
    from onward.config.feedforward_parts import XIELU, Experts, Gated, Plain
    from onward.config.latent_parts import LatentAttention
    from onward.config.lora import EVA, Adapters, Initialization, LoRA, OLoRA, PiSSA
    from onward.config.mixtures import MovingWeight, Ramp
    from onward.config.part_types import Attention, Block, FeedForward, Norm, Position
    from onward.config.position_parts import Alibi, NoPosition, Rotary
    from onward.config.recurrent_parts import AttentionAndMamba2, GatedDeltaNet, Mamba2, ShortConvolution
    from onward.config.routing import Routing, SigmoidRouting, SoftmaxRouting
    from onward.config.scaling import (
        DynamicScaling,
        LinearScaling,
        Llama3Scaling,
        LongRoPEScaling,
        ProportionalScaling,
        Scaling,
        YaRNScaling,
    )
    from onward.data.tokens import Tokens
    from onward.data.windows import Batch, ValidationWindows, Windows
    from onward.evaluation.benchmark import TaskResult
    from onward.evaluation.kept import Kept
    from onward.evaluation.score import Evaluation
    from onward.evaluation.tasks import Task
    from onward.evaluation.text import Score
    from onward.generation.answer import Answer
    from onward.generation.cache.blocks import BlockManager
    from onward.generation.cache.manager import CacheManager
    from onward.generation.distribution import next_token_distribution
    from onward.generation.engine.engine import Engine
    from onward.generation.logprobs import TokenLogprob
    from onward.generation.options import GenerationOptions
    from onward.generation.request import Request
    from onward.generation.results import Completion, SearchResult
    from onward.generation.sampling import Sampling
    from onward.inspection.doctor.checks import doctor
    from onward.inspection.verify import verify
    from onward.model.attachments import attached
    from onward.model.cache import KVCache
    from onward.model.decoder import Decoder
    from onward.model.paged import PagedKVCache
    from onward.reports.explain.page import explain
    from onward.text.tokenizer import Tokenizer
    from onward.text.training import train_tokenizer
    from onward.tracing.edit import edit
    from onward.tracing.names import activation_names
    from onward.tracing.trace import trace
    from onward.training.config import RunConfig
    from onward.training.finetuning.config import FinetuneConfig
    from onward.training.methods.method import Method
    from onward.training.methods.preferences.pairs import PairMethod
    from onward.training.run.events import Notice, Rollback
    from onward.training.run.run import Run
    from onward.training.step.loss import Loss, mean_loss
    from onward.training.step.trainer import Step, StepConfig, StepPlan, Trainer
    from onward.training.step.validation import Validation
    from onward.transforms.lora import add_lora, merge_lora, remove_lora, use_adapter
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "EVA",
    "XIELU",
    "Adapters",
    "Alibi",
    "Answer",
    "Attention",
    "AttentionAndMamba2",
    "AttentionOnly",
    "Batch",
    "Block",
    "BlockManager",
    "BranchNorm",
    "CacheManager",
    "Completion",
    "Decoder",
    "DecoderConfig",
    "DifferentialAttention",
    "DynamicScaling",
    "Engine",
    "Evaluation",
    "Experts",
    "FeedForward",
    "FeedForwardOnly",
    "FinetuneConfig",
    "Gated",
    "GatedDeltaNet",
    "GenerationOptions",
    "Indexer",
    "Indexing",
    "Initialization",
    "KVCache",
    "Kept",
    "LanguageModel",
    "LatentAttention",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "LogScale",
    "LongRoPEScaling",
    "Loss",
    "Mamba2",
    "Method",
    "MovingWeight",
    "NoAttention",
    "NoNorm",
    "NoPosition",
    "Norm",
    "Notice",
    "OLoRA",
    "OutputGate",
    "PagedKVCache",
    "PairMethod",
    "Parallel",
    "PiSSA",
    "Plain",
    "Position",
    "PostNorm",
    "PowerScale",
    "PreNorm",
    "ProportionalScaling",
    "QueryScale",
    "RMSNorm",
    "Ramp",
    "Request",
    "Rollback",
    "Rotary",
    "Routing",
    "Run",
    "RunConfig",
    "Sampling",
    "Sandwich",
    "Scaling",
    "Score",
    "SearchResult",
    "SelfAttention",
    "SharedIndexer",
    "SharedNorm",
    "ShortConvolution",
    "SigmoidGate",
    "SigmoidRouting",
    "Sinusoidal",
    "SoftmaxRouting",
    "SoftplusGate",
    "Step",
    "StepConfig",
    "StepPlan",
    "Task",
    "TaskResult",
    "TokenLogprob",
    "Tokenizer",
    "Tokens",
    "Trainer",
    "UserError",
    "Validation",
    "ValidationWindows",
    "Windows",
    "YaRNScaling",
    "activation_names",
    "add_lora",
    "attached",
    "doctor",
    "edit",
    "explain",
    "finetune",
    "load",
    "mean_loss",
    "merge",
    "merge_lora",
    "next_token_distribution",
    "remove_lora",
    "save",
    "save_adapter",
    "trace",
    "train",
    "train_tokenizer",
    "use_adapter",
    "verify",
]


def describe(value: object) -> str | None:
    from onward.reports.runs.notebook import shown

    return shown(value)


def define_kinds() -> None:
    from onward.families import modules

    modules()


def tried(config: object) -> object:
    """The tensors that each layer caches, for a decoder with custom parts; see `model/own.py`."""
    from onward.model.own import tried

    return tried(config)  # type: ignore[arg-type]


handed.describe, handed.define_kinds, handed.tried = describe, define_kinds, tried
