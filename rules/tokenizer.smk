# Text to token ids: tokenizers/<name>/<version>, trained or adopted
rule tokenizer:
    input:
        build.dependencies,
    output:
        record("{target}"),
    wildcard_constraints:
        target=build.targets("tokenizers"),
    retries: 2
    threads: build.cores
    params:
        python=build.python,
        arguments=build.arguments,
    shell:
        "{params.python} -m marin_build build {wildcards.target} {params.arguments}"
