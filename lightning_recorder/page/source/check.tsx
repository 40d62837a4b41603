/** The check before the training: its questions, with the wrong answers first. */

import { format, toNumber, type Answer, type CheckData } from "./model";

const ORDER = ["wrong", "look", "ok", "no answer"];
const SIGNS: Record<string, string> = { wrong: "✕", look: "!", ok: "✓", "no answer": "–" };

/** The number of answers of each kind. */
function counts(check: CheckData): string {
  return ORDER.map((verdict) => [verdict, check.answers.filter((each) => each.verdict === verdict).length] as const)
    .filter(([, count]) => count).map(([verdict, count]) => `${count} ${verdict}`).join(", ");
}

/** What the check found, on the first screen: the answers that are wrong, and the number of the others. */
export function CheckLine(props: { check: CheckData; onOpen: () => void }) {
  const wrong = props.check.answers.filter((each) => each.verdict === "wrong");
  return (
    <div class={`checked ${wrong.length ? "wrong" : ""}`}>
      <button type="button" class="link" onClick={props.onOpen}>Checked before the training: {counts(props.check)}</button>
      {wrong.map((each) => <p><b>{each.asks || each.question}</b> {sentence(each)}{each.line && ` (${each.line})`}</p>)}
    </div>
  );
}

/** The text of an answer as a sentence; the name of a function or a module stays as it is. */
function sentence(answer: Answer): string {
  const first = answer.text.split(" ", 1)[0]!;
  return `${/[_.]/.test(first) ? answer.text : answer.text.slice(0, 1).toUpperCase() + answer.text.slice(1)}.`;
}

/** All questions with verdict, number, expectation and line of code; at the end those that were left out, by reason. */
export function CheckView(props: { check: CheckData; known: (module: string) => boolean; onPick: (module: string) => void }) {
  const { check } = props;
  const asked = ORDER.slice(0, 3).flatMap((verdict) => check.answers.filter((each) => each.verdict === verdict));
  const reasons = new Map<string, string[]>();
  for (const each of check.answers) if (!asked.includes(each)) reasons.set(each.text, [...reasons.get(each.text) ?? [], each.asks || each.question]);
  return (
    <section class="check" aria-label="check">
      <h2>Check before the training</h2>
      <p class="none">{counts(check)} · {format(check.steps)} steps of work, {format(check.seconds)} s</p>
      <table>
        <thead><tr><th>answer</th><th>question</th><th>found</th><th>expected</th><th>code</th></tr></thead>
        <tbody>{asked.map((each) => (
          <tr class={each.verdict}>
            <th><span class="sign" aria-hidden="true">{SIGNS[each.verdict]}</span> {each.verdict}</th>
            <td>{each.asks || each.question}</td>
            <td>{sentence(each)}{Object.keys(each.numbers).length > 0 && <small> {Object.entries(each.numbers).map(([name, value]) => `${name.replace(/_/g, " ")} ${format(toNumber(value))}`).join(", ")}</small>}
              {" "}{each.module && props.known(each.module) && <button type="button" class="link" onClick={() => props.onPick(each.module)}>{each.module}</button>}</td>
            <td>{each.expected}</td><td>{each.line}</td>
          </tr>))}</tbody>
      </table>
      {reasons.size > 0 && <><h3>Left out</h3><ul>{[...reasons].map(([reason, names]) => <li><b>{names.join(" ")}</b> {reason}.</li>)}</ul></>}
    </section>
  );
}
