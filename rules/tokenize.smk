# Documents as token ids in Arrow shards: tokenized/<name>/<version>
rule tokenize:
    input:
        build.dependencies,
    output:
        record("{target}"),
    wildcard_constraints:
        target=build.targets("tokenized"),
    retries: 2
    threads: build.cores
    params:
        python=build.python,
        arguments=build.arguments,
    shell:
        "{params.python} -m marin_build build {wildcards.target} {params.arguments}"
