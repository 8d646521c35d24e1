# A trained language model: checkpoints/<name>/<version>
rule train:
    input:
        build.dependencies,
    output:
        record("{target}"),
    wildcard_constraints:
        target=build.targets("checkpoints"),
    retries: 2
    threads: build.cores
    params:
        python=build.python,
        arguments=build.arguments,
    shell:
        "{params.python} -m marin_build build {wildcards.target} {params.arguments}"
