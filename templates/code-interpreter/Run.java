import java.io.ByteArrayOutputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Scanner;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;

/**
 * Runs one Java program after the other by the JShell API, in this process: see programs.py. A request is a line of base64
 * words: the code, then names and values of what is set among the system's properties while it runs.
 */
public final class Run {
    private static final String[] IMPORTS = {
        "java.io.*", "java.math.*", "java.net.*", "java.nio.file.*", "java.util.*", "java.util.concurrent.*",
        "java.util.function.*", "java.util.regex.*", "java.util.stream.*", "java.time.*",
    };
    private static OutputStream answers;
    private static JShell shell;
    private static volatile boolean running;
    private static volatile boolean interrupted;

    public static void main(String[] arguments) throws Exception {
        answers = new FileOutputStream("/proc/self/fd/" + arguments[0]);
        System.getenv().forEach((name, value) -> System.getProperties().putIfAbsent(name, value));
        System.setOut(new PrintStream(new Said("stdout"), true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(new Said("stderr"), true, StandardCharsets.UTF_8));
        var requests = new Scanner(System.in, StandardCharsets.US_ASCII);
        shell = JShell.builder().executionEngine("local").build();
        for (String name : IMPORTS) shell.eval("import " + name + ";");
        sun.misc.Signal.handle(new sun.misc.Signal("INT"), signal -> interrupt());
        while (requests.hasNextLine()) {
            List<String> words = new ArrayList<>();
            for (String word : requests.nextLine().split(" ")) {
                words.add(word.equals("=") ? "" : new String(Base64.getDecoder().decode(word), StandardCharsets.UTF_8));
            }
            Map<String, String> before = new HashMap<>();
            for (int at = 1; at + 1 < words.size(); at += 2) {
                before.put(words.get(at), System.getProperty(words.get(at)));
                System.setProperty(words.get(at), words.get(at + 1));
            }
            interrupted = false;
            running = true;
            run(words.get(0));
            running = false;
            System.out.flush();
            System.err.flush();
            before.forEach((name, value) -> {
                if (value == null) System.clearProperty(name);
                else System.setProperty(name, value);
            });
            answer("{\"type\":\"done\"}");
        }
        System.exit(0);
    }

    /** Snippet by snippet, up to the first that fails; the value is that of the last. */
    private static void run(String code) {
        SourceCodeAnalysis analysis = shell.sourceCodeAnalysis();
        SnippetEvent last = null;
        for (String rest = code; !rest.isBlank() && !interrupted; ) {
            SourceCodeAnalysis.CompletionInfo found = analysis.analyzeCompletion(rest);
            String source = found.source() == null || found.source().isEmpty() ? rest : found.source();
            for (SnippetEvent event : shell.eval(source)) {
                // Others are about what this one changed: snippets that were waiting for it.
                if (event.causeSnippet() != null) continue;
                if (!succeeded(event)) return;
                last = event;
            }
            rest = found.source() == null || found.source().isEmpty() ? "" : found.remaining();
        }
        if (interrupted) {
            error("Interrupted", "The execution was interrupted", "");
        } else if (last != null && isExpression(last.snippet()) && last.value() != null && !last.value().equals("null")) {
            answer("{\"type\":\"result\",\"data\":{\"text/plain\":" + quoted(last.value()) + "}}");
        }
    }

    private static boolean isExpression(Snippet snippet) {
        return snippet.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND || snippet.kind() == Snippet.Kind.EXPRESSION;
    }

    private static boolean succeeded(SnippetEvent event) {
        if (event.exception() != null) {
            JShellException thrown = event.exception();
            var trace = new ByteArrayOutputStream();
            thrown.printStackTrace(new PrintStream(trace, true, StandardCharsets.UTF_8));
            String name = thrown instanceof EvalException e ? e.getExceptionClassName() : thrown.getClass().getName();
            if (!interrupted) error(name, String.valueOf(thrown.getMessage()), trace.toString(StandardCharsets.UTF_8));
            return interrupted;
        }
        if (event.status() == Snippet.Status.REJECTED) {
            var found = new StringBuilder();
            shell.diagnostics(event.snippet()).filter(Diag::isError).forEach(one -> {
                found.append(found.isEmpty() ? "" : "\n").append(one.getMessage(null));
            });
            error("CompileError", found.toString(), found + "\n\n" + event.snippet().source());
            return false;
        }
        return true;
    }

    /**
     * The evaluation is told to stop, and whatever it waits for is cut short. Again and again: it may just be about to
     * begin, and what was caught by the code may be followed by more.
     */
    private static void interrupt() {
        interrupted = true;
        while (running) {
            shell.stop();
            for (Thread thread : Thread.getAllStackTraces().keySet()) {
                if (isEvaluation(thread.getThreadGroup())) thread.interrupt();
            }
            try {
                Thread.sleep(20);
            } catch (InterruptedException itself) {
                return;
            }
        }
    }

    private static boolean isEvaluation(ThreadGroup group) {
        return group != null && (group.getName().startsWith("JShell") || isEvaluation(group.getParent()));
    }

    private static void error(String name, String value, String trace) {
        answer("{\"type\":\"error\",\"name\":" + quoted(name) + ",\"value\":" + quoted(value) + ",\"traceback\":" + quoted(trace) + "}");
    }

    private static synchronized void answer(String line) {
        try {
            answers.write((line + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException nobodyListens) {
            System.exit(1);
        }
    }

    private static String quoted(String text) {
        var out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') out.append('\\').append(c);
            else if (c < ' ' || Character.isSurrogate(c)) out.append(String.format("\\u%04x", (int) c));
            else out.append(c);
        }
        return out.append('"').toString();
    }

    /** What the code prints, told when it is flushed: a line's text and its end apart, as E2B's Java tells it. */
    private static final class Said extends OutputStream {
        private final String stream;
        private final ByteArrayOutputStream held = new ByteArrayOutputStream();

        Said(String stream) {
            this.stream = stream;
        }

        @Override
        public synchronized void write(int one) {
            held.write(one);
        }

        @Override
        public synchronized void write(byte[] bytes, int from, int count) {
            held.write(bytes, from, count);
        }

        @Override
        public synchronized void flush() {
            String text = held.toString(StandardCharsets.UTF_8);
            held.reset();
            boolean line = text.length() > 1 && text.endsWith("\n");
            if (line) text = text.substring(0, text.length() - 1);
            if (!text.isEmpty()) tell(text);
            if (line) tell("\n");
        }

        private void tell(String text) {
            answer("{\"type\":\"" + stream + "\",\"text\":" + quoted(text) + "}");
        }
    }
}
