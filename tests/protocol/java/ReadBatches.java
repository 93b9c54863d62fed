import java.io.BufferedOutputStream;
import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.EOFException;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import java.util.StringJoiner;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.record.MemoryRecords;
import org.apache.kafka.common.record.MutableRecordBatch;
import org.apache.kafka.common.record.Record;
import org.apache.kafka.common.utils.Utils;

/**
 * Reads what onceflow has encoded with Kafka's own classes, as a broker and a consumer would.
 *
 * <p>Frames on standard input: kind (int8), length (int32, big endian), bytes. Kind 'B' holds record batches, kind 'M' a key to
 * hash. Every frame is answered with one line of JSON on standard output; bytes are in hex. An error of one frame is its answer,
 * so that one bad case does not hide the others.
 */
public class ReadBatches {
    private static final HexFormat HEX = HexFormat.of();

    public static void main(String[] args) throws Exception {
        DataInputStream in = new DataInputStream(new BufferedInputStream(System.in));
        PrintStream out = new PrintStream(new BufferedOutputStream(System.out, 1 << 20), false, "UTF-8");
        while (true) {
            byte kind;
            try {
                kind = in.readByte();
            } catch (EOFException end) {
                break;
            }
            byte[] frame = in.readNBytes(in.readInt());
            try {
                out.println(kind == 'M' ? "{\"murmur2\":" + Utils.murmur2(frame) + "}" : batches(frame));
            } catch (Exception problem) {
                out.println("{\"error\":\"" + problem.toString().replaceAll("[^a-zA-Z0-9 .:,()]", "_") + "\"}");
            }
        }
        out.flush();
    }

    private static String batches(byte[] frame) {
        StringJoiner all = new StringJoiner(",", "{\"batches\":[", "]}");
        for (MutableRecordBatch batch : MemoryRecords.readableRecords(ByteBuffer.wrap(frame)).batches()) {
            batch.ensureValid();
            StringJoiner records = new StringJoiner(",", "[", "]");
            for (Record record : batch) {
                record.ensureValid();
                records.add(record(record));
            }
            all.add("{\"magic\":" + batch.magic()
                    + ",\"bytes\":" + batch.sizeInBytes()
                    + ",\"compression\":\"" + batch.compressionType().name + "\""
                    + ",\"transactional\":" + batch.isTransactional()
                    + ",\"control\":" + batch.isControlBatch()
                    + ",\"producer_id\":" + batch.producerId()
                    + ",\"producer_epoch\":" + batch.producerEpoch()
                    + ",\"base_sequence\":" + batch.baseSequence()
                    + ",\"last_sequence\":" + batch.lastSequence()
                    + ",\"base_offset\":" + batch.baseOffset()
                    + ",\"last_offset\":" + batch.lastOffset()
                    + ",\"leader_epoch\":" + batch.partitionLeaderEpoch()
                    + ",\"max_timestamp\":" + batch.maxTimestamp()
                    + ",\"count\":" + batch.countOrNull()
                    + ",\"records\":" + records + "}");
        }
        return all.toString();
    }

    private static String record(Record record) {
        StringJoiner headers = new StringJoiner(",", "[", "]");
        for (Header header : record.headers()) {
            headers.add("[\"" + HEX.formatHex(Utils.utf8(header.key())) + "\"," + hex(header.value()) + "]");
        }
        return "{\"offset\":" + record.offset()
                + ",\"sequence\":" + record.sequence()
                + ",\"timestamp\":" + record.timestamp()
                + ",\"key\":" + hex(record.hasKey() ? Utils.toArray(record.key()) : null)
                + ",\"value\":" + hex(record.hasValue() ? Utils.toArray(record.value()) : null)
                + ",\"headers\":" + headers + "}";
    }

    private static String hex(byte[] bytes) {
        return bytes == null ? "null" : "\"" + HEX.formatHex(bytes) + "\"";
    }
}
