"""The command line: `main` names the module of each verb, `arguments` has what verbs take, `output` and `bars` what they print."""
