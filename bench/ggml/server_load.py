#!/usr/bin/env python3
"""llama-server with the plug-in, under load: every answer must be that of the same request alone.

  server_load.py --model FILE [--seconds 600] [--slots 4] [--clients 8] [--context 32768] [--out FILE.json]

`./cmake/run ggml` builds what it needs. Clients send chats of one to three turns over texts of 200 to 6,000 tokens,
some of which begin alike, and give up on some answers halfway. Afterwards the server's memory is compared with that
after a tenth of the time, and some of the requests are sent again, one by one, to a server with one slot. How many
answers are equal is printed; llama.cpp alone (--stock) does not reach all of them either, because in batches of
another shape it rounds otherwise. VERKV_GGML_CHECK compares residents with the engine's rows at every step: a row that has
changed fails the run.
"""
import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time

root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ggml = os.path.join(root, "build", "ggml")
WORDS = ("river stone window garden paper engine bridge winter market silver letter forest candle harbour "
         "mountain teacher doctor kitchen library station summer village island signal basket").split()


class Server:
    def __init__(self, options, slots, report):
        environment = dict(os.environ)
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        if not options.stock:
            environment["GGML_BACKEND_PATH"] = os.path.join(ggml, "bin", "libggml-verkv.so")
            environment["VERKV_GGML_CHECK"] = "on"
            environment["VERKV_GGML_REPORT"] = report
        self.port = options.port
        self.process = subprocess.Popen(
            [os.path.join(ggml, "llama.cpp", "bin", "llama-server"), "-m", options.model, "-fa", "on", "--port",
             str(self.port), "-c", str(options.context), "-np", str(slots), *options.words],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                sys.exit("llama-server did not start")
            time.sleep(0.5)
        sys.exit("llama-server does not answer")

    def complete(self, prompt, tokens, patience):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience)
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True}
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            return answer.get("content")
        except (TimeoutError, OSError):
            return None
        finally:
            connection.close()

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def article(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def client(number, server, options, end, log, lock):
    rng = random.Random(number)
    beginnings = [article(random.Random(1000 + i), 400) for i in range(3)]
    while time.time() < end:
        prompt = (rng.choice(beginnings) if rng.random() < 0.5 else "") + article(rng, rng.randint(150, 4500))
        for _ in range(rng.randint(1, 3)):
            patience = rng.uniform(1, 5) if rng.random() < 0.15 else 600
            answer = server.complete(prompt, 48, patience)
            with lock:
                log.append((prompt, answer))
            if answer is None or time.time() > end:
                break
            prompt += answer + "\n" + article(rng, rng.randint(10, 200))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--again", type=int, default=20, help="requests that are sent again alone")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--stock", action="store_true", help="llama.cpp without the plug-in")
    parser.add_argument("--out")
    parser.add_argument("words", nargs="*", help="further words for llama-server, after --")
    options = parser.parse_args()
    report = tempfile.NamedTemporaryFile(mode="r", suffix=".jsonl")
    server = Server(options, options.slots, report.name)
    log, lock = [], threading.Lock()
    begin = time.time()
    clients = [threading.Thread(target=client, args=(i, server, options, begin + options.seconds, log, lock))
               for i in range(options.clients)]
    for thread in clients:
        thread.start()
    time.sleep(options.seconds / 10)
    early = server.resident_bytes()
    for thread in clients:
        thread.join()
    late = server.resident_bytes()
    server.stop()
    alone = Server(options, 1, report.name)
    answered = [pair for pair in log if pair[1] is not None]
    chosen = random.Random(7).sample(answered, min(options.again, len(answered)))
    equal = sum(alone.complete(prompt, 48, 600) == answer for prompt, answer in chosen)
    alone.stop()
    lines = [json.loads(line) for line in report.read().splitlines()]
    result = {"requests": len(log), "answered": len(answered), "sent_again": len(chosen), "equal": equal,
              "resident_bytes_early": early, "resident_bytes_late": late, "reports": lines,
              "stale_rows": sum(line["stale_rows"] for line in lines)}
    print(json.dumps(result, indent=1))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if result["stale_rows"] or not answered:
        sys.exit(1)


main()
