"""Where the tensors of a Hugging Face model are in the parameters of a Megatron stage: one table for both directions.

A parameter of a stage consists of blocks. A block is a part of one Hugging Face tensor: the rows of some query heads,
the columns of a row-parallel matrix. Reading, exporting and checkpoints copy blocks; nothing else is different.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rloom.engines.megatron.sizes import ModelParallel, Shape

Index = tuple[int | slice, ...]
ALL = slice(None)


@dataclass(frozen=True)
class Block:
    name: str  # name of the Hugging Face tensor
    of: Index  # rows and columns of that tensor
    own: Index  # rows and columns of the Megatron parameter that they fill


@dataclass(frozen=True)
class RankPart:
    """The position of a rank among those that divide the parameters of a stage."""

    tensor: int
    expert: int = 0
    expert_tensor: int = 0


@dataclass(frozen=True)
class Parameter:
    name: str  # in the stage
    shape: tuple[int, ...]
    divided: bool  # over the ranks of `tensor`; otherwise each has all of it
    is_expert: bool = False  # divided over the ranks of `expert` and `expert_tensor` instead
    duplicate: bool = False  # the tied head of the last of several stages: its embedding is on the first


@dataclass(frozen=True)
class ParameterLayout:
    shape: Shape
    sizes: ModelParallel
    has_vocabulary_head: bool  # False: a critic, with a head of one row

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, padded so that all ranks have the same number."""
        return -(-self.shape.vocabulary // self.sizes.tensor) * self.sizes.tensor

    @property
    def expert_tensor(self) -> int:
        return self.sizes.expert_tensor or self.sizes.tensor

    @property
    def layers_per_stage(self) -> int:
        return self.shape.layers // self.sizes.pipeline

    def parameters(self, stage: int) -> Iterator[Parameter]:
        """Parameters of a stage, in the order in which they are exported."""
        shape, tensor = self.shape, self.sizes.tensor
        rows = self.vocabulary // tensor
        if stage == 0:
            yield Parameter("embedding.word_embeddings.weight", (rows, shape.hidden), divided=True)
        for layer in range(self.layers_per_stage):
            for parameter in self.layer_parameters():
                name = f"decoder.layers.{layer}.{parameter.name}"
                yield Parameter(name, parameter.shape, parameter.divided, parameter.is_expert)
        if stage < self.sizes.pipeline - 1:
            return
        yield Parameter("decoder.final_layernorm.weight", (shape.hidden,), divided=False)
        if not self.has_vocabulary_head:
            yield Parameter("value_head.weight", (1, shape.hidden), divided=False)
        elif not shape.tied or self.sizes.pipeline > 1:
            yield Parameter("output_layer.weight", (rows, shape.hidden), divided=True, duplicate=shape.tied)

    def layer_parameters(self) -> Iterator[Parameter]:
        shape, tensor = self.shape, self.sizes.tensor
        queries = shape.heads * shape.head_size // tensor
        yield Parameter("input_layernorm.weight", (shape.hidden,), divided=False)
        yield Parameter("self_attention.linear_qkv.weight", (self.qkv_rows, shape.hidden), divided=True)
        if shape.qkv_bias:
            yield Parameter("self_attention.linear_qkv.bias", (self.qkv_rows,), divided=True)
        if shape.qk_norm:
            yield Parameter("self_attention.q_layernorm.weight", (shape.head_size,), divided=False)
            yield Parameter("self_attention.k_layernorm.weight", (shape.head_size,), divided=False)
        yield Parameter("self_attention.linear_proj.weight", (shape.hidden, queries), divided=True)
        yield Parameter("pre_mlp_layernorm.weight", (shape.hidden,), divided=False)
        if shape.experts is None:
            ffn = shape.ffn // tensor
            yield Parameter("mlp.linear_fc1.weight", (2 * ffn, shape.hidden), divided=True)
            yield Parameter("mlp.linear_fc2.weight", (shape.hidden, ffn), divided=True)
            return
        yield Parameter("mlp.router.weight", (shape.experts.count, shape.hidden), divided=False)
        ffn = shape.experts.ffn // self.expert_tensor
        for expert in range(shape.experts.count // self.sizes.expert):
            prefix = f"mlp.experts.local_experts.{expert}"
            yield Parameter(f"{prefix}.linear_fc1.weight", (2 * ffn, shape.hidden), divided=True, is_expert=True)
            yield Parameter(f"{prefix}.linear_fc2.weight", (shape.hidden, ffn), divided=True, is_expert=True)

    def blocks(self, stage: int, parameter: Parameter, part: RankPart) -> list[Block]:
        """The blocks of a stage's parameter on the rank at `part`."""
        name = parameter.name
        if name.startswith("decoder.layers."):
            _, _, local, inner = name.split(".", 3)
            layer = stage * self.layers_per_stage + int(local)
            return self.layer_blocks(f"model.layers.{layer}.", inner, part)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tied = name.startswith("embedding") or self.shape.tied
            rows = self.vocabulary // self.sizes.tensor
            first, last = part.tensor * rows, min((part.tensor + 1) * rows, self.shape.vocabulary)
            source = "model.embed_tokens.weight" if tied else "lm_head.weight"
            return [Block(source, (slice(first, last), ALL), (slice(0, last - first), ALL))] if last > first else []
        whole = {"decoder.final_layernorm.weight": "model.norm.weight", "value_head.weight": "lm_head.weight"}
        return [Block(whole[name], (ALL,), (ALL,))]

    def layer_blocks(self, prefix: str, inner: str, part: RankPart) -> list[Block]:
        if inner.startswith("self_attention.linear_qkv."):
            return list(self.qkv_blocks(prefix, inner.rsplit(".", 1)[1], part.tensor))
        if inner.startswith("mlp.experts."):
            _, _, _, expert, matrix, _ = inner.split(".")
            return list(self.expert_blocks(prefix, int(expert), matrix, part))
        if inner == "self_attention.linear_proj.weight":
            columns = self.shape.heads * self.shape.head_size // self.sizes.tensor
            return [Block(f"{prefix}self_attn.o_proj.weight", (ALL, share(part.tensor, columns)), (ALL, ALL))]
        ffn = self.shape.ffn // self.sizes.tensor
        if inner == "mlp.linear_fc1.weight":
            rows = share(part.tensor, ffn)
            return [
                Block(f"{prefix}mlp.gate_proj.weight", (rows, ALL), (share(0, ffn), ALL)),
                Block(f"{prefix}mlp.up_proj.weight", (rows, ALL), (share(1, ffn), ALL)),
            ]
        if inner == "mlp.linear_fc2.weight":
            return [Block(f"{prefix}mlp.down_proj.weight", (ALL, share(part.tensor, ffn)), (ALL, ALL))]
        return [Block(prefix + WHOLE[inner], (ALL,), (ALL,))]

    def qkv_blocks(self, prefix: str, kind: str, rank: int) -> Iterator[Block]:
        """megatron-core puts a key-value head's query heads, key and value together; each rank has an equal part of the
        rows. With more ranks than key-value heads, a part ends between the heads of a group."""
        size, queries = self.shape.head_size, self.shape.query_heads_per_group
        own = share(rank, self.qkv_rows)
        tail = (ALL,) if kind == "weight" else ()
        end = 0  # after the rows so far, over all ranks
        for group in range(self.shape.groups):
            for name, of, heads in (("q", group * queries, queries), ("k", group, 1), ("v", group, 1)):
                start, end = end, end + heads * size
                first, last = max(start, own.start), min(end, own.stop)
                if first < last:
                    rows = slice(of * size + first - start, of * size + last - start)
                    here = slice(first - own.start, last - own.start)
                    yield Block(f"{prefix}self_attn.{name}_proj.{kind}", (rows, *tail), (here, *tail))

    @property
    def qkv_rows(self) -> int:
        """Rows of queries, keys and values on one rank."""
        return (self.shape.heads + 2 * self.shape.groups) * self.shape.head_size // self.sizes.tensor

    def expert_blocks(self, prefix: str, local: int, matrix: str, part: RankPart) -> Iterator[Block]:
        """transformers keeps the experts of a layer in one tensor: [experts, rows, columns]."""
        assert self.shape.experts is not None
        total = self.shape.experts.ffn
        ffn = total // self.expert_tensor
        expert = part.expert * (self.shape.experts.count // self.sizes.expert) + local
        first = part.expert_tensor * ffn
        if matrix == "linear_fc2":
            yield Block(f"{prefix}mlp.experts.down_proj", (expert, ALL, slice(first, first + ffn)), (ALL, ALL))
            return
        for number in range(2):  # gate and up
            start = number * total + first
            rows = slice(start, start + ffn)
            yield Block(f"{prefix}mlp.experts.gate_up_proj", (expert, rows, ALL), (share(number, ffn), ALL))


WHOLE = {  # parameters that every rank has whole
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def share(rank: int, size: int) -> slice:
    return slice(rank * size, (rank + 1) * size)
