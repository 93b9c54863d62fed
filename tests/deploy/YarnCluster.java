import java.io.File;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.server.MiniYARNCluster;

/**
 * Hadoop's own YARN in one process: a resource manager and node managers, which start containers as processes of this
 * machine. Arguments: a folder, and how many node managers. It writes yarn-site.xml into the folder for clients when
 * all is running, and ends with its standard input.
 */
public class YarnCluster {
    public static void main(String[] arguments) throws Exception {
        Path folder = Path.of(arguments[0]);
        YarnConfiguration configuration = new YarnConfiguration();
        // A node would refuse containers when the disk of this machine is 90 % full.
        configuration.set("yarn.nodemanager.disk-health-checker.enable", "false");
        configuration.set("yarn.nodemanager.delete.debug-delay-sec", "3600");
        configuration.set("yarn.scheduler.minimum-allocation-mb", "128");
        configuration.set("yarn.nodemanager.vmem-check-enabled", "false");
        configuration.set("yarn.scheduler.capacity.root.queues", "default");
        configuration.set("yarn.scheduler.capacity.root.default.capacity", "100");
        // The default keeps a tenth of the memory for masters of applications.
        configuration.set("yarn.scheduler.capacity.maximum-am-resource-percent", "0.5");
        configuration.set("yarn.resourcemanager.am.max-attempts", "10");
        configuration.set("hadoop.tmp.dir", folder.resolve("tmp").toString());
        configuration.set("yarn.app.mapreduce.am.staging-dir", folder.resolve("staging").toString());
        System.setProperty("test.build.data", folder.resolve("data").toString());
        MiniYARNCluster cluster = new MiniYARNCluster("yarn", Integer.parseInt(arguments[1]), 1, 1);
        cluster.init(configuration);
        cluster.start();
        if (!cluster.waitForNodeManagersToConnect(60_000)) {
            throw new IllegalStateException("the node managers did not connect");
        }
        Path written = folder.resolve("yarn-site.xml.new");
        try (OutputStream out = Files.newOutputStream(written)) {
            cluster.getConfig().writeXml(out);
        }
        Files.move(written, folder.resolve("yarn-site.xml"));
        while (System.in.read() >= 0) {
        }
        cluster.stop();
    }
}
