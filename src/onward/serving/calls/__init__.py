"""The formats in which models write tool calls and reasoning, with their parsers and their grammars or schemas;
forms.py selects one."""
