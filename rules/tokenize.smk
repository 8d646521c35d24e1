# Documents as token ids in Arrow shards: tokenized/<name>/<version>
rule tokenize:
    input:
        build.dependencies,
        build.parts,
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


# A share of the work on a token set: parts/<set>/<k>-of-<N>/<version>; N is the setting tokenize_parts
rule tokenize_part:
    input:
        build.dependencies,
    output:
        record("{target}"),
    wildcard_constraints:
        target=build.targets("parts"),
    retries: 2
    threads: 1
    params:
        python=build.python,
        arguments=build.arguments,
    shell:
        "{params.python} -m marin_build build {wildcards.target} {params.arguments}"
