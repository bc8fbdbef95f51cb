"""Mutants of the styles of decoders: a kind of bug, and in each style where it can stand the line and what is there
instead. A kind's name says what is wrong. Two substitutions of one mutant are joined by AND."""

AND = " && "
# kind: {style: "line => line instead"}
KINDS: dict[str, dict[str, str]] = {
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
    "scale of the whole width": {
        "buffer_mask": "math.sqrt(k.size(-1)) => math.sqrt(C)",
        "config_class": "is_causal=True => is_causal=True, scale=C**-0.5",
        "one_head_each": "k.shape[-1] ** -0.5 => C**-0.5",
        "functional": "q.shape[-1] ** 0.5 => x.shape[-1] ** 0.5",
        "linear_bias": "math.sqrt(self.head_dim) => math.sqrt(d)",
    },
    "scale without the root": {
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
    "values repeated in another order than keys": {
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
    "no activation": {
        "config_class": "x = self.gelu(x) => pass",
        "buffer_mask": "            NewGELU(),\n => ",
        "functional": "hidden = F.gelu(hidden) => pass",
        "one_head_each": "            nn.ReLU(),\n => ",
        "linear_bias": "self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(y))) => self.dense_4h_to_h(self.dense_h_to_4h(y))",
        "time_first": "self.fc2(F.relu(self.fc1(x))) => self.fc2(self.fc1(x))",
        "model_output": "self.act_fn(self.gate_proj(x)) * self.up_proj(x) => self.gate_proj(x) * self.up_proj(x)",
        "torch_encoder": 'activation="gelu" => activation=lambda y: y',
    },
    "activation after the second matrix": {
        "config_class": "        x = self.gelu(x)\n        x = self.c_proj(x)\n"
        + " =>         x = self.c_proj(x)\n        x = self.gelu(x)\n",
        "linear_bias": "self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(y)))"
        + " => F.gelu(self.dense_4h_to_h(self.dense_h_to_4h(y)))",
    },
    "residual of attention missing": {
        "config_class": "x = x + self.attn( => x = self.attn(",
        "buffer_mask": "x = x + self.attn( => x = self.attn(",
        "model_output": "hidden_states = residual + hidden_states => pass",
        "complex_rotary": "h = x + self.attention( => h = self.attention(",
        "functional": "x = x + attention( => x = attention(",
        "one_head_each": "x = x + self.sa( => x = self.sa(",
        "time_first": "self.norm1(x + self.dropout(a)) => self.norm1(self.dropout(a))",
    },
    "residual of the MLP missing": {
        "config_class": "x = x + self.mlp( => x = self.mlp(",
        "model_output": "return residual + hidden_states => return hidden_states",
        "complex_rotary": "return h + self.feed => return self.feed",
        "functional": "x = x + mlp( => x = mlp(",
        "one_head_each": "x = x + self.ffwd( => x = self.ffwd(",
        "time_first": "self.norm2(x + self.dropout(f)) => self.norm2(self.dropout(f))",
        "layers_of_pairs": "x = x + out => x = out",
    },
    "residual doubled": {
        "config_class": "x = x + self.mlp( => x = x + x + self.mlp(",
        "buffer_mask": "x = x + self.attn( => x = 2 * x + self.attn(",
        "model_output": "return residual + hidden_states => return residual + residual + hidden_states",
        "complex_rotary": "return h + self.feed => return x + h + self.feed",
        "functional": "x = x + mlp( => x = x + x + mlp(",
        "layers_of_pairs": "x = x + out => x = x + x + out",
        "linear_bias": "return x + self.attention(y) + feedforward => return x + x + self.attention(y) + feedforward",
        "one_head_each": "x = x + self.ffwd( => x = x + x + self.ffwd(",
    },
    "norm missing on one branch": {
        "config_class": "self.mlp(self.ln_2(x)) => self.mlp(x)",
        "buffer_mask": "self.attn(self.ln1(x)) => self.attn(x)",
        "complex_rotary": "self.feed_forward(self.ffn_norm(h)) => self.feed_forward(h)",
        "one_head_each": "self.sa(self.ln1(x)) => self.sa(x)",
    },
    "norm without epsilon": {
        "model_output": "variance + self.variance_epsilon => variance",
        "complex_rotary": " + self.eps) => )",
        "functional": "variance + eps => variance",
        "layers_of_pairs": "F.normalize(x, dim=-1) => x / x.norm(dim=-1, keepdim=True)",
        "config_class": "self.ln_2 = nn.LayerNorm(config.n_embd) => self.ln_2 = nn.LayerNorm(config.n_embd, eps=0.0)",
    },
    "norm over the tokens": {
        "functional": "x.mean(-1, keepdim=True) => x.mean(1, keepdim=True)",
        "model_output": "pow(2).mean(-1, keepdim=True) => pow(2).mean(1, keepdim=True)",
        "layers_of_pairs": "F.normalize(x, dim=-1) => F.normalize(x, dim=1)",
    },
    "norm of the batch": {
        "one_head_each": "self.ln_f = nn.LayerNorm(n_embd) => self.ln_f = nn.BatchNorm1d(n_embd)"
        + AND
        + "x = self.ln_f(x) => x = self.ln_f(x.transpose(1, 2)).transpose(1, 2)",
    },
    "norm that multiplies": {
        "model_output": "torch.rsqrt(variance => torch.sqrt(variance",
        "functional": "(x - mean) / torch.sqrt(variance + eps) => (x - mean) * torch.sqrt(variance + eps)",
    },
    "final norm not called": {
        "config_class": 'x = self.transformer["ln_f"](x) => pass',
        "buffer_mask": "self.head(self.ln_f(x)) => self.head(x)",
        "model_output": "self.lm_head(self.norm(hidden_states)) => self.lm_head(hidden_states)",
        "functional": 'x = layer_norm(x, p["scale"], p["shift"]) => pass',
    },
    "log-softmax on the logits": {
        "buffer_mask": "logits = self.head(self.ln_f(x)) => logits = self.head(self.ln_f(x)).log_softmax(-1)",
        "complex_rotary": "self.output(self.norm(h)).float() => self.output(self.norm(h)).float().log_softmax(-1)",
        "functional": 'torch.einsum("btd,dv->btv", x, p["unembedding"])'
        + ' => torch.einsum("btd,dv->btv", x, p["unembedding"]).log_softmax(-1)',
        "linear_bias": "self.lm_head(self.ln_f(x)) => self.lm_head(self.ln_f(x)).log_softmax(-1)",
    },
    "softmax on the logits": {
        "config_class": "logits = self.lm_head(x)\n => logits = self.lm_head(x).softmax(-1)\n",
        "torch_encoder": "return self.linear(x) => return self.linear(x).softmax(-1)",
        "time_first": "self.out(x).transpose => self.out(x).softmax(-1).transpose",
    },
    "ReLU on the logits": {
        "model_output": "self.lm_head(self.norm(hidden_states)) => self.lm_head(self.norm(hidden_states)).relu()",
        "layers_of_pairs": "return self.to_logits(x) => return F.relu(self.to_logits(x))",
        "one_head_each": "logits = self.lm_head(x) => logits = self.lm_head(x).relu()",
    },
    "tanh on the logits": {
        "linear_bias": "self.lm_head(self.ln_f(x)) => self.lm_head(self.ln_f(x)).tanh()",
        "torch_encoder": "return self.linear(x) => return self.linear(x).tanh()",
    },
    "dropout in eval": {
        "config_class": "p = self.dropout if self.training else 0.0 => p = self.dropout",
        "time_first": "f = self.fc2( => f = F.dropout(self.fc2(" + AND + "(self.fc1(x))) => (self.fc1(x))), 0.1)",
    },
    "dropout that never acts": {
        "config_class": "        p = self.dropout if self.training else 0.0 =>         p = 0.0"
        + AND
        + "return self.resid_dropout(self.c_proj(y)) => return self.c_proj(y)"
        + AND
        + "return self.dropout(x) => return x"
        + AND
        + 'x = self.transformer["drop"](x) => pass',
    },
    "attention never added": {
        "config_class": "x = x + self.attn(self.ln_1(x)) => self.attn(self.ln_1(x))",
        "functional": "x = x + attention( => _ = attention(",
    },
    "a layer never called": {
        "config_class": 'in self.transformer["h"]: => in self.transformer["h"][:1]:',
        "model_output": "for layer in self.layers: => for layer in self.layers[1:]:",
        "complex_rotary": "h = layer(h, freqs_cis, mask) => h = self.layers[0](h, freqs_cis, mask)",
        "time_first": "for layer in self.stack: => for layer in self.stack[:-1]:",
    },
    "a branch detached": {
        "buffer_mask": "self.mlp(self.ln2(x)) => self.mlp(self.ln2(x)).detach()",
        "model_output": "self.o_proj(attn_output) => self.o_proj(attn_output.detach())",
        "layers_of_pairs": "out = layer(norm(x), freqs) => out = layer(norm(x.detach()), freqs).detach()",
    },
    "forward without gradients": {
        "complex_rotary": "        _, seqlen = tokens.shape => "
        + "        torch.set_grad_enabled(False)\n        _, seqlen = tokens.shape"
        + AND
        + "        return self.output(self.norm(h)).float() => "
        + "        y = self.output(self.norm(h)).float()\n        torch.set_grad_enabled(True)\n        return y",
    },
    "rows of the batch mixed": {
        "complex_rotary": "output.transpose(1, 2).contiguous().view(b, t, -1)"
        + " => output.permute(2, 0, 1, 3).reshape(b, t, -1)",
        "linear_bias": "x = self.word_embeddings_layernorm(self.word_embeddings(tokens))"
        + " => x = self.word_embeddings_layernorm(self.word_embeddings(tokens))\n        x = x - x.mean(0)",
        "time_first": "ids = ids.t() => ids = ids.reshape(ids.size(1), ids.size(0))",
    },
    "token ids folded": {
        "functional": '["embedding"][tokens] => ["embedding"][tokens // 2]',
        "layers_of_pairs": "self.token_emb(x) => self.token_emb(x % 50)",
        "time_first": "self.tokens(ids) => self.tokens(ids.clamp(max=40))",
    },
    "embedding scaled twice": {
        "torch_encoder": "* math.sqrt(self.d_model) => * self.d_model",
    },
    "loss without the token 0": {
        "config_class": "ignore_index=-1 => ignore_index=0",
        "buffer_mask": "targets.reshape(-1)) => targets.reshape(-1), ignore_index=0)",
        "model_output": "labels[:, 1:].reshape(-1)) => labels[:, 1:].reshape(-1), ignore_index=0)",
        "one_head_each": "targets.view(B * T)) => targets.view(B * T), ignore_index=0)",
        "linear_bias": "logits.transpose(1, 2), targets) => logits.transpose(1, 2), targets, ignore_index=0)",
    },
    "ignored targets in the loss": {
        "buffer_mask": "targets.reshape(-1)) => targets.reshape(-1).clamp(min=0))",
        "model_output": "labels[:, 1:].reshape(-1)) => labels[:, 1:].reshape(-1).clamp(min=0))",
    },
    "targets shifted twice": {
        "buffer_mask": "logits.view(-1, logits.size(-1)), targets.reshape(-1)"
        + " => logits[:, :-1].reshape(-1, logits.size(-1)), targets[:, 1:].reshape(-1)",
        "linear_bias": "logits.transpose(1, 2), targets) => logits[:, :-1].transpose(1, 2), targets[:, 1:])",
    },
    "targets not shifted": {
        "model_output": "logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:] => "
        + "logits.reshape(-1, logits.size(-1)), labels",
    },
    "loss over the wrong axis": {
        "linear_bias": "logits.transpose(1, 2), targets) => logits.reshape(len(tokens), -1, tokens.size(1)), targets)",
        "one_head_each": "logits.view(B * T, C) => logits.transpose(1, 2).reshape(B * T, C)",
    },
    "sum instead of mean": {
        "config_class": 'ignore_index=-1 => ignore_index=-1, reduction="sum"',
        "one_head_each": 'targets.view(B * T)) => targets.view(B * T), reduction="sum")',
    },
    "loss of the last token alone": {
        "buffer_mask": "logits.view(-1, logits.size(-1)), targets.reshape(-1) => logits[:, -1], targets[:, -1]",
    },
    "initialization far too large": {
        "config_class": "nn.init.normal_(module.weight, mean=0.0, std=0.02)\n            if"
        + " => nn.init.normal_(module.weight, mean=0.0, std=2.0)\n            if"
        + AND
        + "elif isinstance(module, nn.Embedding) => elif isinstance(module, nn.Conv1d)",
        "functional": "std, E = 0.02 => std, E = 1.0",
        "model_output": "std=0.02 => std=1.0",
    },
    "initialization constant": {
        "buffer_mask": "module.weight.data.normal_(mean=0.0, std=0.02) => module.weight.data.fill_(0.02)",
        "linear_bias": "nn.init.normal_(p, std=0.02) => nn.init.constant_(p, 0.02)",
    },
}
MUTANTS = [(style, kind) for kind, styles in KINDS.items() for style in styles]
