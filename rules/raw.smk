# Text as it was found: raw/<name>/<version>
rule raw:
    input:
        build.dependencies,
    output:
        record("{target}"),
    wildcard_constraints:
        target=build.targets("raw"),
    retries: 2
    threads: 1
    params:
        python=build.python,
        arguments=build.arguments,
    shell:
        "{params.python} -m marin_build build {wildcards.target} {params.arguments}"
