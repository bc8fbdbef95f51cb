"""Bugs in positions: rotations, tables, padding and biases."""

from support.substitutions import AND

POSITIONS: dict[str, dict[str, str]] = {
    "rotation of queries alone": {
        "model_output": "k_embed = (k * cos) + (rotate_half(k) * sin) => k_embed = k",
        "complex_rotary": "torch.view_as_real(k * freqs_cis) => torch.view_as_real(k)",
        "layers_of_pairs": "rotate_pairs(q, freqs), rotate_pairs(k, freqs) => rotate_pairs(q, freqs), k",
    },
    "rotation of keys alone": {
        "model_output": "q_embed = (q * cos) + (rotate_half(q) * sin) => q_embed = q",
        "layers_of_pairs": "rotate_pairs(q, freqs), rotate_pairs(k, freqs) => q, rotate_pairs(k, freqs)",
    },
    "keys rotated backwards": {
        "model_output": "(k * cos) + (rotate_half(k) => (k * cos) - (rotate_half(k)",
        "complex_rotary": "(k * freqs_cis) => (k * freqs_cis.conj())",
        "layers_of_pairs": "rotate_pairs(k, freqs) => rotate_pairs(k, -freqs)",
    },
    "keys with another base": {
        "model_output": "k_embed = (k * cos) + (rotate_half(k) * sin)"
        + " => k_embed = (k * cos**2) + (rotate_half(k) * (1 - cos**4).clamp(min=0).sqrt())",
        "complex_rotary": "(k * freqs_cis) => (k * freqs_cis**0.5)",
        "layers_of_pairs": "rotate_pairs(k, freqs) => rotate_pairs(k, freqs**1.1)",
    },
    "keys with other pairs": {
        "model_output": "k_embed = (k * cos) + (rotate_half(k) * sin)"
        + " => k_embed = (k * cos) + torch.stack((-k[..., 1::2], k[..., ::2]), -1).flatten(-2) * sin",
        "layers_of_pairs": "rotate_pairs(k, freqs)"
        + " => torch.cat([k[..., :4] * freqs.cos() - k[..., 4:] * freqs.sin(),"
        + " k[..., :4] * freqs.sin() + k[..., 4:] * freqs.cos()], -1)",
    },
    "rotation without a minus": {
        "model_output": "torch.cat((-x2, x1), dim=-1) => torch.cat((x2, x1), dim=-1)",
        "layers_of_pairs": "a * cos - b * sin => a * cos + b * sin",
    },
    "rotation over heads": {
        "model_output": "q_embed = (q * cos) + (rotate_half(q) * sin)"
        + " => cos, sin = cos[:, :, 1:2], sin[:, :, 1:2]\n    h = (torch.arange(q.shape[1]) % 2)[:, None, None]\n"
        + "    q_embed = q * (1 + h * (cos - 1)) + h * rotate_half(q) * sin"
        + AND
        + "k_embed = (k * cos) + (rotate_half(k) * sin) => k_embed = k",
        "layers_of_pairs": "rotate_pairs(q, freqs), rotate_pairs(k, freqs)"
        + " => rotate_pairs(q, (freqs[1] * torch.arange(h)[:, None])[:, None]),"
        + " rotate_pairs(k, (freqs[1] * torch.arange(h)[:, None])[:, None])",
    },
    "rotation of values": {
        "model_output": "v = repeat_kv(k, self.num_heads // self.num_kv), repeat_kv(v"
        + " => v = repeat_kv(k, self.num_heads // self.num_kv), repeat_kv(apply_rotary_pos_emb(v, v, cos, sin)[0]",
        "layers_of_pairs": "rotate_pairs(k, freqs)\n => rotate_pairs(k, freqs)\n        v = rotate_pairs(v, freqs)\n",
    },
    "frequencies inverted": {
        "model_output": "1.0 / (base ** => 1.0 * (base **",
        "complex_rotary": "1.0 / (theta ** => 1.0 * (theta **",
        "layers_of_pairs": "10000 ** (-torch => 10000 ** (torch",
    },
    "one frequency for all pairs": {
        "model_output": "(torch.arange(0, dim, 2) / dim) => (torch.zeros(dim // 2) / dim)",
        "complex_rotary": "(torch.arange(0, dim, 2).float() / dim) => (torch.zeros(dim // 2) / dim)",
    },
    "positions constant": {
        "config_class": "pos = torch.arange(0, t) => pos = torch.zeros(t, dtype=torch.long)",
        "buffer_mask": "self.pos_emb[:, :t, :] => self.pos_emb[:, :1, :]",
        "model_output": "freqs = position_ids[..., None].float() => freqs = 0 * position_ids[..., None].float()",
        "complex_rotary": "[start_pos : start_pos + seqlen] => [start_pos : start_pos + 1]",
        "torch_encoder": "self.pe[:, : x.size(1)] => self.pe[:, :1]",
        "functional": '["positions"][: tokens.shape[1]] => ["positions"][:1]',
        "one_head_each": "_table(torch.arange(T)) => _table(torch.zeros(T, dtype=torch.long))",
        "linear_bias": "alibi = -self.slopes[:, None, None] * distance"
        + " => alibi = -self.slopes[:, None, None] * distance * 0",
        "time_first": "torch.arange(T))[:, None] => torch.zeros(T, dtype=torch.long))[:, None]",
    },
    "positions reversed": {
        "config_class": "pos = torch.arange(0, t) => pos = torch.arange(t - 1, -1, -1)",
        "functional": '["positions"][: tokens.shape[1]] => ["positions"][: tokens.shape[1]].flip(0)',
        "one_head_each": "_table(torch.arange(T)) => _table(T - 1 - torch.arange(T))",
        "time_first": "torch.arange(T))[:, None] => torch.arange(T).flip(0))[:, None]",
    },
    "positions from the tokens": {
        "config_class": '["wpe"](pos) => ["wpe"](idx % 32)',
        "one_head_each": "_table(torch.arange(T)) => _table(idx % block_size)",
        "time_first": "self.position(torch.arange(T))[:, None] => self.position(ids % 32)",
    },
    "positions twice the same": {
        "config_class": "pos = torch.arange(0, t) => pos = torch.arange(0, t) // 2",
        "functional": '["positions"][: tokens.shape[1]]'
        + ' => ["positions"].repeat_interleave(2, 0)[: tokens.shape[1]]',
        "model_output": "position_ids[..., None].float() => (position_ids // 2)[..., None].float()",
        "layers_of_pairs": "torch.arange(x.shape[1]).float() => (torch.arange(x.shape[1]) // 2).float()",
    },
    "positions along the batch": {
        "functional": '["positions"][: tokens.shape[1]] => ["positions"][: tokens.shape[0], None]',
        "torch_encoder": "self.pe[:, : x.size(1)] => self.pe[:, : x.size(0)].transpose(0, 1)",
    },
    "positions that ignore padding on the left": {
        "model_output": "(padding.cumsum(-1) - 1).clamp(min=0) => torch.arange(t)[None]"
        + AND
        + "position_embeddings = self.rotary_emb(position_ids)"
        + " => position_embeddings = self.rotary_emb(torch.arange(t)[None] ** 1.1)",
    },
    "padding attended to": {
        "model_output": " & padding[:, None, None, :].bool() => ",
    },
    "biases with the wrong sign": {
        "linear_bias": "alibi = -self.slopes => alibi = self.slopes",
    },
    "one bias for all heads": {
        "linear_bias": "2 ** (-8 * (i + 1) / heads) => 2 ** (-8 / heads)",
    },
}
