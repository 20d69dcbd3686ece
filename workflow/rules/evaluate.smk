FEATURES = f"{ROOT}/features/{{run}}/{{dataset}}-{{split}}{{norm}}"
EVALUATION = f"{ROOT}/evaluations/{{run}}/{{evaluation}}"


rule features:
    input:
        config=resolved("features", f"{FEATURES}.yaml"),
        run=f"{RUN}/done",
        shards=lambda w: shards_stamp(w.dataset, w.split),
    output:
        stamp=f"{FEATURES}.done",
    log:
        f"{LOGS}/{{run}}/features-{{dataset}}-{{split}}{{norm}}.log",
    benchmark:
        f"{BENCHMARKS}/{{run}}/features-{{dataset}}-{{split}}{{norm}}.tsv"
    wildcard_constraints:
        norm=f"({re.escape(resolve.WITHOUT_NORM)}({re.escape(resolve.LAST)}[0-9]+)?)?",
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        **CLUSTER,
    params:
        config=f"{FEATURES}.yaml",
    message:
        "Features of {wildcards.run} on {wildcards.dataset} {wildcards.split}"
    shell:
        on_devices("maect features {params.config:q}")


# One rule for each protocol (maect/evaluate): knn, linear_probe and so on.
for protocol in PROTOCOLS.values():

    rule:
        name:
            protocol.name
        input:
            config=resolved(protocol.name, f"{EVALUATION}.yaml"),
            made_of=evaluation_inputs,
        output:
            stamp=f"{EVALUATION}.done",
        log:
            f"{LOGS}/{{run}}/{{evaluation}}.log",
        benchmark:
            f"{BENCHMARKS}/{{run}}/{{evaluation}}.tsv"
        wildcard_constraints:
            evaluation=one_of(
                n for n, p in experiment.protocols.items() if p == protocol.name
            ),
        localrule: True
        conda:
            ENVIRONMENT
        resources:
            **CLUSTER,
        params:
            config=f"{EVALUATION}.yaml",
        message:
            "Evaluating {wildcards.run}: {wildcards.evaluation}"
        shell:
            on_devices("maect evaluate {params.config:q}")


rule evaluations:
    input:
        [
            f"{ROOT}/evaluations/{run}/{name}.done"
            for run, name in experiment.evaluations
        ],
    localrule: True
