#!/bin/bash
# What Spark on Kubernetes asks an image to do: run as driver, run as executor. Anything else is a command to run.
set -euo pipefail

jars="${SPARK_CONF_DIR:-$SPARK_HOME/conf}:${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$SPARK_HOME/jars/*"

case "${1:-}" in
driver)
    shift
    set -- "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
        --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" "$@"
    ;;
executor)
    shift
    # JVM options come one by one in variables that are numbered: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ...
    options=()
    while IFS= read -r name; do
        options+=("${!name}")
    done < <(compgen -v SPARK_JAVA_OPT_ | sort -t_ -k4 -n)
    set -- "$JAVA_HOME/bin/java" ${options[@]+"${options[@]}"} \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$jars" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
esac

exec tini -s -- "$@"
