"""Bugs in attention: masks, softmax, scales and heads."""

from support.substitutions import AND

ATTENTION: dict[str, dict[str, str]] = {
    "no mask": {
        "config_class": "is_causal=True => is_causal=False",
        "buffer_mask": 'att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")) => pass',
        "model_output": ".bool).tril()[None => .bool)[None",
        "complex_rotary": "scores = scores + mask => pass",
        "torch_encoder": "(x, mask=mask) => (x)",
        "functional": "torch.where(visible, logits, torch.tensor(-1e9, dtype=x.dtype)) => logits",
        "one_head_each": 'wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")) => pass',
        "layers_of_pairs": "sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max) => pass",
        "linear_bias": "scores = scores.masked_fill(distance < 0, torch.finfo(x.dtype).min) => pass",
        "time_first": "attn_mask=mask => attn_mask=None",
    },
    "mask off by one": {
        "model_output": ".tril()[None => .tril(1)[None",
        "complex_rotary": "triu(diagonal=1) => triu(diagonal=2)",
        "functional": "[:, None] >= torch => [:, None] >= -1 + torch",
        "layers_of_pairs": "dtype=torch.bool).triu(1) => dtype=torch.bool).triu(2)",
        "linear_bias": "distance < 0 => distance < -1",
        "time_first": "diagonal=1 => diagonal=2",
    },
    "mask turned around": {
        "buffer_mask": "torch.tril( => torch.triu(",
        "functional": "[:, None] >= torch => [:, None] <= torch",
        "one_head_each": "torch.tril( => torch.triu(",
        "linear_bias": "distance < 0 => distance > 0",
    },
    "mask after the softmax": {
        "buffer_mask": 'att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")) => pass'
        + AND
        + "att = self.attn_drop(att) => att = self.attn_drop(att * self.mask[:, :, :T, :T])",
        "model_output": "attn_weights = attn_weights + attention_mask => pass"
        + AND
        + "torch.matmul(attn_weights, v) => torch.matmul(attn_weights * (attention_mask == 0), v)",
        "complex_rotary": "scores = scores + mask => pass"
        + AND
        + "torch.matmul(scores, values) => torch.matmul(scores * (mask == 0), values)",
        "one_head_each": 'wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")) => pass'
        + AND
        + "return wei @ v => return (wei * self.tril[:T, :T]) @ v",
    },
    "mask of zeros before the softmax": {
        "buffer_mask": '== 0, float("-inf") => == 0, 0.0',
        "functional": "torch.tensor(-1e9 => torch.tensor(0.0",
        "one_head_each": '== 0, float("-inf") => == 0, 0.0',
        "layers_of_pairs": "causal_mask, -torch.finfo(sim.dtype).max => causal_mask, 0",
    },
    "mask of a tiny number": {
        "functional": "-1e9 => -1e-9",
        "linear_bias": "torch.finfo(x.dtype).min => torch.finfo(x.dtype).tiny",
        "model_output": "torch.finfo(torch.float32).min => torch.finfo(torch.float32).tiny",
    },
    "no token sees itself": {
        "functional": "[:, None] >= torch => [:, None] > torch",
        "linear_bias": "distance < 0 => distance <= 0",
        "model_output": ".tril()[None => .tril(-1)[None",
    },
    "softmax over the queries": {
        "buffer_mask": "F.softmax(att, dim=-1) => F.softmax(att, dim=-2)",
        "model_output": "attn_weights, dim=-1 => attn_weights, dim=-2",
        "functional": "softmax(logits, dim=-1) => softmax(logits, dim=-2)",
        "layers_of_pairs": "sim.softmax(dim=-1) => sim.softmax(dim=-2)",
    },
    "softmax over the heads": {
        "model_output": "attn_weights, dim=-1 => attn_weights, dim=1",
        "complex_rotary": "scores.float(), dim=-1 => scores.float(), dim=1",
    },
    "softmax of a softmax": {
        "buffer_mask": "att = self.attn_drop(att) => att = self.attn_drop(F.softmax(att + (att - 1) * 0, dim=-1))"
        + AND
        + "att = F.softmax(att, dim=-1) => att = F.softmax(att, dim=-1).masked_fill("
        + 'self.mask[:, :, :T, :T] == 0, float("-inf"))',
        "one_head_each": "wei = self.dropout(wei) => wei = F.softmax(wei.masked_fill(wei == 0, float('-inf')), -1)",
    },
    "tokens and heads mixed": {
        "config_class": "q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)"
        + " => q = q.reshape(B, self.n_head, T, C // self.n_head)",
        "buffer_mask": "(att @ v).transpose(1, 2).contiguous() => (att @ v).contiguous()",
        "model_output": "v).transpose(1, 2).reshape => v).reshape",
        "complex_rotary": "output.transpose(1, 2).contiguous() => output.contiguous()",
        "linear_bias": "permute(0, 2, 1, 3).reshape => reshape",
    },
    "scale missing": {
        "config_class": "is_causal=True => is_causal=True, scale=1.0",
        "buffer_mask": " * (1.0 / math.sqrt(k.size(-1))) => ",
        "model_output": " / math.sqrt(self.head_dim) => ",
        "complex_rotary": " / self.head_dim**0.5 => ",
        "functional": "logits = logits / q.shape[-1] ** 0.5 => pass",
        "one_head_each": " * k.shape[-1] ** -0.5 => ",
        "layers_of_pairs": "q = q * self.scale => pass",
        "linear_bias": "alpha=1 / math.sqrt(self.head_dim) => alpha=1",
    },
    "scale of the full width": {
        "buffer_mask": "math.sqrt(k.size(-1)) => math.sqrt(C)",
        "config_class": "is_causal=True => is_causal=True, scale=C**-0.5",
        "one_head_each": "k.shape[-1] ** -0.5 => C**-0.5",
        "functional": "q.shape[-1] ** 0.5 => x.shape[-1] ** 0.5",
        "linear_bias": "math.sqrt(self.head_dim) => math.sqrt(d)",
    },
    "scale without the square root": {
        "buffer_mask": "math.sqrt(k.size(-1)) => k.size(-1)",
        "model_output": "math.sqrt(self.head_dim) => self.head_dim",
        "complex_rotary": "self.head_dim**0.5 => self.head_dim",
        "layers_of_pairs": "dim_head**-0.5 => dim_head**-1",
    },
    "multiplied by the root": {
        "model_output": " / math.sqrt(self.head_dim) =>  * math.sqrt(self.head_dim)",
        "functional": "logits / q.shape => logits * q.shape",
        "one_head_each": "k.shape[-1] ** -0.5 => k.shape[-1] ** 0.5",
    },
    "key/value heads repeated in the wrong order": {
        "model_output": "hidden_states[:, :, None, :, :].expand(b, heads, n_rep, length, dim)"
        + " => hidden_states[:, None].expand(b, n_rep, heads, length, dim)",
        "complex_rotary": "torch.repeat_interleave(xk, n_rep, dim=2).transpose"
        + " => xk.repeat(1, 1, n_rep, 1).transpose"
        + AND
        + "torch.repeat_interleave(xv, n_rep, dim=2).transpose => xv.repeat(1, 1, n_rep, 1).transpose",
    },
    "values repeated in a different order than keys": {
        "model_output": "repeat_kv(v, self.num_heads // self.num_kv)"
        + " => v.repeat(1, self.num_heads // self.num_kv, 1, 1)",
        "complex_rotary": "torch.repeat_interleave(xv, n_rep, dim=2).transpose => xv.repeat(1, 1, n_rep, 1).transpose",
    },
    "heads shared": {
        "one_head_each": "[Head(head_size) for _ in range(num_heads)] => [Head(head_size)] * num_heads",
        "functional": 'torch.einsum("btd,dhe->bhte", x, p[f"{name}_wv"])'
        + ' => torch.einsum("btd,dhe->bhte", x, p[f"{name}_wv"][:, :1].expand(-1, HEADS, -1))'
        + AND
        + 'torch.einsum("btd,dhe->bhte", x, p[f"{name}_wq"])'
        + ' => torch.einsum("btd,dhe->bhte", x, p[f"{name}_wq"][:, :1].expand(-1, HEADS, -1))'
        + AND
        + 'torch.einsum("btd,dhe->bhte", x, p[f"{name}_wk"])'
        + ' => torch.einsum("btd,dhe->bhte", x, p[f"{name}_wk"][:, :1].expand(-1, HEADS, -1))',
    },
    "values are the keys": {
        "buffer_mask": "v = self.value(x) => v = self.key(x)",
        "model_output": "v = self.v_proj(hidden_states) => v = self.k_proj(hidden_states)",
        "one_head_each": "v = self.value(x) => v = self.key(x)",
    },
}
