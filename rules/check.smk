# Which encoder may be used: checks/encoder/<tokenizer>/<version>
rule check:
    input:
        build.dependencies,
    output:
        record("{target}"),
    wildcard_constraints:
        target=build.targets("checks"),
    retries: 2
    threads: 1
    params:
        python=build.python,
        arguments=build.arguments,
    shell:
        "{params.python} -m marin_build build {wildcards.target} {params.arguments}"
