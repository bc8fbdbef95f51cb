"""Bugs in layers: activations, residuals, norms, logits, dropout, and layers or rows that are confused."""

from support.substitutions import AND

LAYERS: dict[str, dict[str, str]] = {
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
}
