"""Bugs in the loss and in the initial weights."""

from support.substitutions import AND

TRAINING: dict[str, dict[str, str]] = {
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
