import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.processor.PunctuationType;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.ProcessorSupplier;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.WindowStore;
import org.apache.kafka.streams.state.WindowStoreIterator;

/**
 * The measured job on Kafka Streams: the first record of every event_id within one hour goes on, the others end.
 *
 * <p>Two variants. {@code window} is the published "find distinct events" recipe: a persistent window store asked for
 * the ID within an hour on both sides. {@code keyvalue} keeps one time for each ID in a persistent key-value store and
 * deletes old ones in a scan every ten minutes. Neither refreshes an ID when a duplicate comes, both keep the store's
 * default settings (no record cache), and both find the ID with a byte scan instead of a JSON parser: each of these is
 * to the peer's advantage.
 */
public final class KsDedup {
  private static final String STORE = "seen";
  private static final Duration GUARD = Duration.ofHours(1);
  private static final Duration SCAN_EVERY = Duration.ofMinutes(10);
  private static final byte[] BEFORE_ID = "\"event_id\":\"".getBytes(StandardCharsets.US_ASCII);

  private KsDedup() {}

  /** Takes: BROKER SOURCE OUTPUT APPLICATION_ID STATE_DIR window|keyvalue COMPRESSION THREADS COMMIT_INTERVAL_MS. */
  public static void main(String[] args) throws InterruptedException {
    if (args.length != 9) {
      System.err.println(
          "usage: KsDedup BROKER SOURCE OUTPUT APPLICATION_ID STATE_DIR window|keyvalue COMPRESSION THREADS COMMIT_MS");
      System.exit(2);
    }
    KafkaStreams streams = new KafkaStreams(topology(args[1], args[2], args[5]), settings(args));
    CountDownLatch ended = new CountDownLatch(1);
    streams.setUncaughtExceptionHandler(
        failure -> {
          failure.printStackTrace();
          ended.countDown();
          return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
    Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(10))));
    streams.start();
    ended.await();
    System.exit(1);
  }

  private static Properties settings(String[] args) {
    Properties settings = new Properties();
    settings.putAll(
        Map.of(
            StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0],
            StreamsConfig.APPLICATION_ID_CONFIG, args[3],
            StreamsConfig.STATE_DIR_CONFIG, args[4],
            StreamsConfig.NUM_STREAM_THREADS_CONFIG, args[7],
            StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, args[8],
            StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2,
            StreamsConfig.REPLICATION_FACTOR_CONFIG, "1",
            "auto.offset.reset", "earliest"));
    // Larger batches than the defaults: they make this peer faster on this workload.
    settings.putAll(
        Map.of(
            "producer.compression.type", args[6],
            "producer.linger.ms", "20",
            "producer.batch.size", "131072",
            "consumer.max.poll.records", "5000",
            "consumer.max.partition.fetch.bytes", "4194304"));
    return settings;
  }

  private static Topology topology(String source, String output, String variant) {
    Topology topology = new Topology();
    topology.addSource("source", Serdes.ByteArray().deserializer(), Serdes.ByteArray().deserializer(), source);
    ProcessorSupplier<byte[], byte[], byte[], byte[]> processor;
    StoreBuilder<?> store;
    switch (variant) {
      case "window" -> {
        processor = WindowVariant::new;
        store =
            Stores.windowStoreBuilder(
                Stores.persistentWindowStore(STORE, GUARD, GUARD, false), Serdes.String(), Serdes.Long());
      }
      case "keyvalue" -> {
        processor = KeyValueVariant::new;
        store = Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore(STORE), Serdes.String(), Serdes.Long());
      }
      default -> throw new IllegalArgumentException("window or keyvalue, not " + variant);
    }
    topology.addProcessor("dedup", processor, "source");
    topology.addStateStore(store, "dedup");
    topology.addSink("output", output, Serdes.ByteArray().serializer(), Serdes.ByteArray().serializer(), "dedup");
    return topology;
  }

  private static String eventId(byte[] json) {
    int last = json.length - BEFORE_ID.length;
    for (int at = 0; at <= last; at++) {
      if (!startsAt(json, at)) {
        continue;
      }
      int start = at + BEFORE_ID.length;
      int end = start;
      while (json[end] != '"') {
        end++;
      }
      return new String(json, start, end - start, StandardCharsets.US_ASCII);
    }
    throw new IllegalArgumentException("no event_id in a record");
  }

  private static boolean startsAt(byte[] json, int at) {
    for (int i = 0; i < BEFORE_ID.length; i++) {
      if (json[at + i] != BEFORE_ID[i]) {
        return false;
      }
    }
    return true;
  }

  private static final class WindowVariant implements Processor<byte[], byte[], byte[], byte[]> {
    private ProcessorContext<byte[], byte[]> context;
    private WindowStore<String, Long> seen;

    @Override
    public void init(ProcessorContext<byte[], byte[]> given) {
      context = given;
      seen = given.getStateStore(STORE);
    }

    @Override
    public void process(Record<byte[], byte[]> event) {
      String id = eventId(event.value());
      long time = event.timestamp();
      boolean duplicate;
      try (WindowStoreIterator<Long> found =
          seen.fetch(id, time - GUARD.toMillis(), time + GUARD.toMillis())) {
        duplicate = found.hasNext();
      }
      if (!duplicate) {
        seen.put(id, time, time);
        context.forward(event);
      }
    }
  }

  private static final class KeyValueVariant implements Processor<byte[], byte[], byte[], byte[]> {
    private ProcessorContext<byte[], byte[]> context;
    private KeyValueStore<String, Long> seen;
    private long newest = 0;

    @Override
    public void init(ProcessorContext<byte[], byte[]> given) {
      context = given;
      seen = given.getStateStore(STORE);
      given.schedule(SCAN_EVERY, PunctuationType.WALL_CLOCK_TIME, now -> deleteOld());
    }

    @Override
    public void process(Record<byte[], byte[]> event) {
      String id = eventId(event.value());
      long time = event.timestamp();
      newest = Math.max(newest, time);
      Long before = seen.get(id);
      if (before == null || Math.abs(time - before) > GUARD.toMillis()) {
        seen.put(id, time);
        context.forward(event);
      }
    }

    private void deleteOld() {
      try (KeyValueIterator<String, Long> all = seen.all()) {
        while (all.hasNext()) {
          KeyValue<String, Long> entry = all.next();
          if (entry.value < newest - GUARD.toMillis()) {
            seen.delete(entry.key);
          }
        }
      }
    }
  }
}
