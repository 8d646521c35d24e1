# snakemake checkpoints/quickstart/2026.06.28
#
# builds that artifact and all it needs: raw text → tokenizer → tokenized shards → checkpoint. What is built is what
# config/<artifact>.yaml says. `snakemake -n TARGET` tells what would run and why. In any other repository:
#
#   module marin_build:
#       snakefile: "path/to/this/Snakefile"
#       config: {"recipes": "my_recipes"}
#   use rule * from marin_build
from marin_build.adapter import Build, record


configfile: "config/config.yaml"


build = Build(workflow, config)


localrules:
    quickstart,


# `snakemake` alone
rule quickstart:
    input:
        record("checkpoints/quickstart/2026.06.28"),


include: "rules/raw.smk"
include: "rules/tokenizer.smk"
include: "rules/check.smk"
include: "rules/tokenize.smk"
include: "rules/train.smk"
